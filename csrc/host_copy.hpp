// SPDX-License-Identifier: Apache-2.0
// Copies slices between the mapped memory of engines and the arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "layout.hpp"
#include "plan.hpp"
#include "team.hpp"

namespace kvgrpc {

enum class Stop : int {
    none,
    truncated,  // a file of the engine is shorter than it was
    io,         // the system could not give the memory: no space behind a hole, or memory that broke
};

// The first `completed` pieces are copied. When they are not all, why, and whether bytes of the next one may have
// moved. Later ones are untouched.
struct Report {
    std::uint64_t completed = 0;
    Stop stop = Stop::none;
    bool torn = false;
};

struct CopyOptions {
    unsigned threads = 0;            // of the team, with the caller; 0: the cores, at most 4
    std::uint64_t stream_bytes = 0;  // slices this large pass the caches by; 0: half the last-level cache
    std::uint64_t bytes_a_hand = std::uint64_t{1} << 20;  // a thread joins for each so many bytes of a slice
};

// Threads: any number may copy at once, each its own mapping; two copies of one mapping are safe and race for bytes
// only where they name the same ones. Copies of overlapping places of the arena are the caller's to avoid.
class HostCopier {
  public:
    // The arena's memory must outlive it.
    HostCopier(std::byte* arena, std::uint64_t arena_bytes, const CopyOptions& options);

    // Copies a slice (see read_slice). With `pace`, every run is moved alone, in order, by the caller, after a call of
    // `pace`, which may throw. Throws BadRequest before anything has moved.
    Report copy(const Mapping& mapping, std::span<const std::int64_t> words, Direction direction,
                const std::function<void()>& pace = {});

    unsigned threads() const noexcept { return team_.size(); }
    std::uint64_t stream_bytes() const noexcept { return stream_bytes_; }

  private:
    std::byte* const arena_;
    const std::uint64_t arena_bytes_;
    const std::uint64_t stream_bytes_;
    const std::uint64_t bytes_a_hand_;
    Team team_;
};

}  // namespace kvgrpc
