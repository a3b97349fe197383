// What takes a compiler longest to read; all of the C++ is compiled with it read once (build_backend/cuops_build/host.py).
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
