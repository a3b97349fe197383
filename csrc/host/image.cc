#include "image.h"

#include <cstdint>
#include <cstring>

#include "error.h"

// Written by build_backend/cuops_build/nvrtc.py: a count, that many entries, the compressed images.
extern "C" const unsigned char cuops_images[];

// Of lzma.zig.
extern "C" bool cuops_decompress_lzma(const unsigned char* in, std::size_t in_size, unsigned char properties, unsigned char* out,
                                      std::size_t out_size);

namespace cuops {
namespace {

struct Entry {
  char source[32];
  std::uint32_t capability, ptx, cuda, properties;
  std::uint64_t offset, stored_size, size;
};

}  // namespace

std::vector<char> Image::decompress() const {
  std::vector<char> out(size + 1);  // PTX is text that ends with a zero
  if (!cuops_decompress_lzma(stored, stored_size, properties, reinterpret_cast<unsigned char*>(out.data()), size)) {
    raise("cuops.errors.DamagedBackendError", "the image of " + source + " in the cuops library is damaged");
  }
  return out;
}

const std::vector<Image>& images() {
  static const auto& all = *new std::vector<Image>([] {
    std::uint64_t count;
    std::memcpy(&count, cuops_images, sizeof count);
    std::vector<Image> found;
    for (std::uint64_t i = 0; i < count; ++i) {
      Entry e;
      std::memcpy(&e, cuops_images + sizeof count + i * sizeof e, sizeof e);
      found.push_back({e.source, static_cast<int>(e.capability), e.ptx != 0, static_cast<int>(e.cuda),
                       static_cast<unsigned char>(e.properties), cuops_images + e.offset, e.stored_size, e.size});
    }
    return found;
  }());
  return all;
}

const Image& choose_image(const std::string& source, int capability) {
  const Image* best = nullptr;
  bool known = false;
  for (const Image& image : images()) {
    if (image.source != source) continue;
    known = true;
    const bool fits = image.capability <= capability && (image.ptx || image.capability / 10 == capability / 10);
    if (!fits) continue;
    const bool better =
        best == nullptr || (best->ptx && !image.ptx) || (best->ptx == image.ptx && best->capability < image.capability);
    if (better) best = &image;
  }
  if (!known) raise("cuops.errors.DamagedBackendError", "the cuops library has no image of " + source);
  if (best == nullptr) {
    const std::string name = std::to_string(capability / 10) + "." + std::to_string(capability % 10);
    raise("cuops.errors.UnsupportedArchitectureError", "the backend has no code for compute capability " + name);
  }
  return *best;
}

}  // namespace cuops
