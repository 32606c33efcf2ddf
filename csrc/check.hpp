// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes that cannot wrap, and the one way to refuse.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace kvgrpc {

// What was asked for cannot be. Thrown before any byte has moved.
class BadRequest : public std::invalid_argument {
  public:
    using std::invalid_argument::invalid_argument;
};

inline void require(bool holds, const char* otherwise) {
    if (!holds) throw BadRequest(otherwise);
}

inline std::uint64_t sum(std::uint64_t a, std::uint64_t b) {
    std::uint64_t out = 0;
    require(!__builtin_add_overflow(a, b, &out), "a sum of sizes does not fit 64 bits");
    return out;
}

inline std::uint64_t product(std::uint64_t a, std::uint64_t b) {
    std::uint64_t out = 0;
    require(!__builtin_mul_overflow(a, b, &out), "a product of sizes does not fit 64 bits");
    return out;
}

// [offset, offset + length) must lie in [0, size).
inline void require_inside(std::uint64_t offset, std::uint64_t length, std::uint64_t size, const char* otherwise) {
    require(length <= size && offset <= size - length, otherwise);
}

}  // namespace kvgrpc
