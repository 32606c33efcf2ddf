// SPDX-License-Identifier: Apache-2.0
// What a slice asks for, checked, and the runs of bytes that follow from it, in rounds of bounded size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout.hpp"

namespace kvgrpc {

enum class Direction { store, retrieve };  // engine to arena, arena to engine

// Bytes [low, high) of one chunk's object, as far as they belong to the named blocks. `extents` are pairs of (offset,
// length) in the arena that hold the object from its first byte on; `blocks[g]` are engine blocks of group g.
struct Piece {
    struct Blocks {
        std::uint64_t first;  // block of the chunk that ids[0] holds
        std::span<const std::int64_t> ids;
    };

    std::span<const std::int64_t> extents;
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    std::vector<Blocks> blocks;
    bool ordered = false;  // two runs have one target: they must be copied one after the other
};

using Slice = std::vector<Piece>;

// Reads a slice from numbers: pieces, then for each piece: extents, (offset, length) of each; low, high; and for each
// group: first block, ids, each id. Throws BadRequest unless everything lies inside the arena, the object and the
// engine's blocks. What it returns points into `words`.
Slice read_slice(std::span<const std::int64_t> words, const Paging& paging, std::uint64_t arena_bytes,
                 Direction direction);

// `length` contiguous bytes on both sides.
struct Run {
    std::byte* engine;
    std::byte* arena;
    std::uint64_t length;
};

// A file of the engine must have at least `end` bytes.
struct Need {
    std::uint32_t file;
    std::uint64_t end;
};

// Consecutive runs of one segment; what one thread takes at a time.
struct Unit {
    std::uint32_t segment;
    std::uint32_t first_run;
    std::uint32_t runs;
};

// The runs of one piece in one round. Segments are copied one after the other, the units of one side by side.
struct Segment {
    std::uint32_t piece;
    bool begun;  // runs of this piece were in an earlier round
    std::uint32_t first_unit;
    std::uint32_t units;
    std::uint32_t first_need;
    std::uint32_t needs;
};

// The runs of all blocks in one layer and plane, which lie in one file: those up to the next row's first. One that goes
// on where the row before it ended may be part of that one's last run.
struct Row {
    std::size_t first_run;
    std::uint32_t file;
};

struct Round {
    std::vector<Run> runs;
    std::vector<Row> rows;
    std::vector<Unit> units;
    std::vector<Segment> segments;
    std::vector<Need> needs;

    std::span<const Need> needs_of(const Segment& segment) const {
        return std::span(needs).subspan(segment.first_need, segment.needs);
    }
};

// How finely work is cut.
struct Grain {
    std::uint64_t most_unit_bytes = std::uint64_t{256} << 10;
    std::uint64_t least_unit_bytes = std::uint64_t{32} << 10;
    unsigned units_per_piece = 8;      // aimed at, between those bounds
    std::uint32_t round_runs = 65536;  // about; bounds the memory that a slice of tiny runs takes
};

// Makes the rounds of a slice. The slice and the paging must outlive it.
class Plan {
  public:
    Plan(const Paging& paging, std::byte* arena, const Slice& slice, Direction direction, const Grain& grain);

    // Fills the next round; false when there is none.
    bool next(Round& round);

  private:
    bool begin_piece();
    bool next_row();
    void add_row(Round& round);
    void place(Round& round, std::byte* engine, std::uint64_t head, std::uint64_t length);
    void add_run(Round& round, std::byte* engine, std::byte* arena, std::uint64_t length);
    void add_need(Round& round, std::uint32_t file, std::uint64_t end);
    void end_segment(Round& round);

    const Paging& paging_;
    std::byte* const arena_;
    const Slice& slice_;
    const Direction direction_;
    const Grain grain_;

    // Where the plan stands: piece, group, entry, row (layer and plane), and the object's byte where the row begins.
    std::uint32_t piece_ = 0;
    std::size_t group_ = 0;
    std::size_t entry_ = 0;
    std::uint64_t row_ = 0;
    std::uint64_t row_start_ = 0;
    bool piece_open_ = false;
    bool piece_begun_ = false;
    std::uint64_t unit_bytes_ = 0;

    // The extent in use ends at this byte of the object, and object byte b lies at arena byte b + shift (mod 2^64).
    std::size_t next_extent_ = 0;
    std::uint64_t extent_end_ = 0;
    std::uint64_t shift_ = 0;

    // Of the segment that is being filled.
    std::size_t segment_run_ = 0;
    std::size_t segment_need_ = 0;
    std::size_t seam_run_ = 0;  // no earlier run goes on in it: files may follow each other, and no run leaves one
    std::vector<std::size_t> need_of_file_;  // where in Round::needs; stale unless it lies in this segment
};

}  // namespace kvgrpc
