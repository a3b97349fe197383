// What the library says of itself.
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "image.h"

namespace cuops {

// One line an image: operator, "sm" or "ptx", compute capability, bytes.
tvm::ffi::String describe_images() {
  std::string text;
  for (const Image& image : images()) {
    text += image.op + (image.ptx ? " ptx " : " sm ") + std::to_string(image.capability) + " " + std::to_string(image.size) + "\n";
  }
  return text;
}

}  // namespace cuops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe_images, cuops::describe_images);
