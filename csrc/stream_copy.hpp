// SPDX-License-Identifier: Apache-2.0
// Copies that pass the caches by.
#pragma once

#include <cstddef>

namespace kvgrpc {

// memcpy whose stores do not read the target's lines first and leave the caches as they are, where the processor can.
// Pays when more is copied than the last-level cache holds. Other threads see the bytes after `stream_fence`.
// `next_target` and `next_source` are where the copy after this one will be, or anywhere: a hint that is worth half of
// the speed when runs are as short as a page.
void stream_copy(std::byte* target, const std::byte* source, std::size_t length, const std::byte* next_target,
                 const std::byte* next_source) noexcept;

// Orders streamed bytes before everything that this thread stores afterwards.
void stream_fence() noexcept;

}  // namespace kvgrpc
