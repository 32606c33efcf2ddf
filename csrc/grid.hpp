// SPDX-License-Identifier: Apache-2.0
// Runs that lie at equal distances on both sides, so that one copy in two dimensions moves them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan.hpp"

namespace kvgrpc {

// `rows` times `width` bytes; a row begins `pitch` bytes after the one before it.
struct Grid {
    std::byte* engine;
    std::byte* arena;
    std::uint64_t width;
    std::uint64_t rows;
    std::uint64_t engine_pitch;
    std::uint64_t arena_pitch;
};

// Parts of the arena that one copy may not leave.
struct Parts {
    const std::byte* arena;
    std::uint64_t bytes;

    std::uint64_t of(const std::byte* at) const noexcept { return static_cast<std::uint64_t>(at - arena) / bytes; }
};

// Sorts the runs of a round: into grids where that is worth a copy of its own, and the rest, cut where parts end.
void find_grids(const Round& round, const Parts& parts, std::vector<Grid>& grids, std::vector<Run>& rest);

// The runs of a round, cut where parts end.
void cut_runs(const Round& round, const Parts& parts, std::vector<Run>& runs);

}  // namespace kvgrpc
