// SPDX-License-Identifier: Apache-2.0
#include "stream_copy.hpp"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvgrpc {

#if defined(__SSE2__)

namespace {

constexpr std::size_t line = 64;
constexpr std::size_t ahead = 2048;  // bytes; how far the source is fetched before it is read
constexpr std::size_t worthwhile = 1024;

void fetch(const std::byte* source) noexcept { _mm_prefetch(reinterpret_cast<const char*>(source), _MM_HINT_NTA); }

// One line to a target at a line's start.
void stream_line(std::byte* target, const std::byte* source) noexcept {
    const auto* from = reinterpret_cast<const __m128i*>(source);
    auto* to = reinterpret_cast<__m128i*>(target);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

}  // namespace

void stream_copy(std::byte* target, const std::byte* source, std::size_t length, const std::byte* next_target,
                 const std::byte* next_source) noexcept {
    if (length < worthwhile) {
        for (std::size_t at = 0; at < length; at += line) fetch(next_source + at);
        std::memcpy(target, source, length);
        return;
    }
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % line;
    std::memcpy(target, source, head);
    const std::size_t end = head + (length - head) / line * line;
    const std::size_t own =
        end - head > ahead ? end - ahead : head;  // up to here it is this run's bytes that are fetched
    std::size_t at = head;
    for (; at < own; at += line) {
        fetch(source + at + ahead);
        stream_line(target + at, source + at);
    }
    fetch(next_target);  // for its page's translation
    for (; at < end; at += line) {
        fetch(next_source + (at - own));
        stream_line(target + at, source + at);
    }
    std::memcpy(target + end, source + end, length - end);
}

void stream_fence() noexcept { _mm_sfence(); }

#else

void stream_copy(std::byte* target, const std::byte* source, std::size_t length, const std::byte*,
                 const std::byte*) noexcept {
    std::memcpy(target, source, length);
}

void stream_fence() noexcept {}

#endif

}  // namespace kvgrpc
