// SPDX-License-Identifier: Apache-2.0
#include "grid.hpp"

#include <algorithm>
#include <span>

namespace kvgrpc {
namespace {

constexpr std::uint64_t least_rows = 4;  // fewer are as cheap in a batch
// Rows of this length and more are as fast in a batch, and few.
constexpr std::uint64_t too_wide = std::uint64_t{64} << 10;
constexpr std::uint64_t most_pitch = (std::uint64_t{1} << 31) - 1;  // CU_DEVICE_ATTRIBUTE_MAX_PITCH of every card

void cut(const Run& run, const Parts& parts, std::vector<Run>& out) {
    Run rest = run;
    while (rest.length > 0) {
        const auto inside = static_cast<std::uint64_t>(rest.arena - parts.arena) % parts.bytes;
        const std::uint64_t length = std::min(rest.length, parts.bytes - inside);
        out.push_back({rest.engine, rest.arena, length});
        rest.engine += length;
        rest.arena += length;
        rest.length -= length;
    }
}

bool is_pitch(std::uint64_t pitch, std::uint64_t width) { return pitch >= width && pitch <= most_pitch; }

// One grid for each run of a row grows row after row, for as long as rows look alike.
class Finder {
  public:
    Finder(const Parts& parts, std::vector<Grid>& grids, std::vector<Run>& rest)
        : parts_(parts), grids_(grids), rest_(rest) {}

    void add(std::span<const Run> row, std::uint32_t file) {
        if (row.size() != open_.size() || file != file_) {
            end();
            file_ = file;
            for (const Run& run : row) open_.push_back(begun(run));
            return;
        }
        for (std::size_t i = 0; i < row.size(); ++i) {
            if (grow(open_[i], row[i])) continue;
            emit(open_[i]);
            open_[i] = begun(row[i]);
        }
    }

    void end() {
        for (const Grid& grid : open_) emit(grid);
        open_.clear();
    }

  private:
    static Grid begun(const Run& run) { return {run.engine, run.arena, run.length, 1, 0, 0}; }

    bool grow(Grid& grid, const Run& run) const {
        if (run.length != grid.width || parts_.of(grid.arena) != parts_.of(run.arena + run.length - 1)) return false;
        const auto engine = static_cast<std::uint64_t>(run.engine - grid.engine);  // of a run that lies before: huge
        const auto arena = static_cast<std::uint64_t>(run.arena - grid.arena);
        if (grid.rows == 1) {
            if (!is_pitch(engine, grid.width) || !is_pitch(arena, grid.width)) return false;
            grid.engine_pitch = engine;
            grid.arena_pitch = arena;
        } else if (engine != grid.rows * grid.engine_pitch || arena != grid.rows * grid.arena_pitch) {
            return false;
        }
        ++grid.rows;
        return true;
    }

    void emit(const Grid& grid) {
        if (grid.rows >= least_rows && grid.width < too_wide) {
            grids_.push_back(grid);
            return;
        }
        for (std::uint64_t row = 0; row < grid.rows; ++row) {
            const Run run{grid.engine + row * grid.engine_pitch, grid.arena + row * grid.arena_pitch, grid.width};
            cut(run, parts_, rest_);
        }
    }

    const Parts& parts_;
    std::vector<Grid>& grids_;
    std::vector<Run>& rest_;
    std::vector<Grid> open_;
    std::uint32_t file_ = 0;
};

}  // namespace

void find_grids(const Round& round, const Parts& parts, std::vector<Grid>& grids, std::vector<Run>& rest) {
    Finder finder(parts, grids, rest);
    for (std::size_t i = 0; i < round.rows.size(); ++i) {
        const std::size_t first = round.rows[i].first_run;
        const std::size_t end = i + 1 < round.rows.size() ? round.rows[i + 1].first_run : round.runs.size();
        if (first < end) finder.add(std::span(round.runs).subspan(first, end - first), round.rows[i].file);
    }
    finder.end();
}

void cut_runs(const Round& round, const Parts& parts, std::vector<Run>& runs) {
    for (const Run& run : round.runs) cut(run, parts, runs);
}

}  // namespace kvgrpc
