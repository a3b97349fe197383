// Errors that reach Python as the class of the same name.
#pragma once

#include <tvm/ffi/error.h>

#include <string>

namespace cuops {

[[noreturn]] inline void raise(const char* kind, const std::string& message) { throw tvm::ffi::Error(kind, message, ""); }

}  // namespace cuops
