#include "image.h"

#include <cstdint>
#include <cstring>

#include "error.h"

// Written by build_backend/cuops_build/nvrtc.py: a count, that many entries, the compressed images.
extern "C" const unsigned char cuops_images[];

namespace cuops {
namespace {

struct Entry {
  char source[32];
  std::uint32_t capability, ptx, cuda, unused;
  std::uint64_t offset, stored_size, size;
};

// One LZ4 block (the format's description is in the LZ4 project's doc/lz4_Block_format.md).
bool decompress_lz4(const unsigned char* in, std::size_t in_size, char* out, std::size_t out_size) {
  const unsigned char* const in_end = in + in_size;
  char* const begin = out;
  char* const end = out + out_size;
  auto length_of = [&](std::size_t nibble) {
    std::size_t length = nibble;
    for (unsigned char more = 255; nibble == 15 && more == 255 && in < in_end;) length += more = *in++;
    return length;
  };
  while (in < in_end) {
    const unsigned char token = *in++;
    const std::size_t literals = length_of(token >> 4);
    if (literals > std::size_t(in_end - in) || literals > std::size_t(end - out)) return false;
    std::memcpy(out, in, literals);
    in += literals;
    out += literals;
    if (in == in_end) break;  // the last sequence has no match
    if (in_end - in < 2) return false;
    const std::size_t distance = in[0] | in[1] << 8;
    in += 2;
    const std::size_t match = length_of(token & 15) + 4;
    if (distance == 0 || distance > std::size_t(out - begin) || match > std::size_t(end - out)) return false;
    if (distance >= match) {
      std::memcpy(out, out - distance, match);
    } else {
      for (std::size_t i = 0; i < match; ++i) out[i] = out[i - distance];  // each as it was just written
    }
    out += match;
  }
  return out == end;
}

}  // namespace

std::vector<char> Image::decompress() const {
  std::vector<char> out(size + 1);  // PTX is text that ends with a zero
  if (!decompress_lz4(stored, stored_size, out.data(), size)) {
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
      found.push_back({e.source, static_cast<int>(e.capability), e.ptx != 0, static_cast<int>(e.cuda), cuops_images + e.offset,
                       e.stored_size, e.size});
    }
    return found;
  }());
  return all;
}

const Image& choose_image(const std::string& source, int capability) {
  const Image* best = nullptr;
  for (const Image& image : images()) {
    const bool fits =
        image.source == source && image.capability <= capability && (image.ptx || image.capability / 10 == capability / 10);
    if (!fits) continue;
    const bool better =
        best == nullptr || (best->ptx && !image.ptx) || (best->ptx == image.ptx && best->capability < image.capability);
    if (better) best = &image;
  }
  if (best == nullptr) {
    const std::string name = std::to_string(capability / 10) + "." + std::to_string(capability % 10);
    raise("cuops.errors.UnsupportedArchitectureError", "the backend has no code for compute capability " + name);
  }
  return *best;
}

}  // namespace cuops
