// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include <algorithm>
#include <cassert>

#include "check.hpp"

namespace kvgrpc {
namespace {

// Takes numbers off the front.
class Words {
  public:
    explicit Words(std::span<const std::int64_t> words) : rest_(words) {}

    std::uint64_t one() {
        require(!rest_.empty(), "the slice ends too early");
        const std::int64_t word = rest_.front();
        require(word >= 0, "a slice has no negative numbers");
        rest_ = rest_.subspan(1);
        return static_cast<std::uint64_t>(word);
    }

    std::span<const std::int64_t> many(std::uint64_t count) {
        require(count <= rest_.size(), "the slice ends too early");
        const auto taken = rest_.first(count);
        rest_ = rest_.subspan(count);
        return taken;
    }

    std::size_t left() const { return rest_.size(); }

  private:
    std::span<const std::int64_t> rest_;
};

std::uint64_t checked_extents(std::span<const std::int64_t> extents, std::uint64_t arena_bytes) {
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < extents.size(); i += 2) {
        require(extents[i] >= 0 && extents[i + 1] >= 0, "a slice has no negative numbers");
        const auto length = static_cast<std::uint64_t>(extents[i + 1]);
        require_inside(static_cast<std::uint64_t>(extents[i]), length, arena_bytes, "an extent outside the arena");
        bytes = sum(bytes, length);
    }
    return bytes;
}

void check_blocks(const Piece::Blocks& blocks, const Group& group) {
    require_inside(blocks.first, blocks.ids.size(), group.chunk_blocks, "a piece names blocks outside its chunk");
    for (const std::int64_t id : blocks.ids) {
        require(id >= 0 && static_cast<std::uint64_t>(id) < group.num_blocks, "a block id outside the engine's memory");
    }
}

bool has_repeats(std::span<const std::int64_t> ids) {
    std::vector<std::int64_t> sorted(ids.begin(), ids.end());
    std::ranges::sort(sorted);
    return std::ranges::adjacent_find(sorted) != sorted.end();
}

Piece read_piece(Words& words, const Paging& paging, std::uint64_t arena_bytes, Direction direction) {
    Piece piece;
    piece.extents = words.many(product(words.one(), 2));
    const std::uint64_t extent_bytes = checked_extents(piece.extents, arena_bytes);
    piece.low = words.one();
    piece.high = words.one();
    require(piece.low <= piece.high && piece.high <= paging.object_bytes(), "a span outside the object");
    require(piece.high <= extent_bytes, "extents shorter than the span");
    piece.blocks.reserve(paging.groups().size());
    for (const Group& group : paging.groups()) {
        const std::uint64_t first = words.one();
        piece.blocks.push_back({first, words.many(words.one())});
        check_blocks(piece.blocks.back(), group);
        piece.ordered = piece.ordered || (direction == Direction::retrieve && has_repeats(piece.blocks.back().ids));
    }
    return piece;
}

}  // namespace

Slice read_slice(std::span<const std::int64_t> words, const Paging& paging, std::uint64_t arena_bytes,
                 Direction direction) {
    Words rest(words);
    const std::uint64_t pieces = rest.one();
    require(pieces <= rest.left(), "the slice ends too early");
    Slice slice;
    slice.reserve(pieces);
    for (std::uint64_t i = 0; i < pieces; ++i) slice.push_back(read_piece(rest, paging, arena_bytes, direction));
    require(rest.left() == 0, "numbers are left over after the slice");
    return slice;
}

Plan::Plan(const Paging& paging, std::byte* arena, const Slice& slice, Direction direction, const Grain& grain)
    : paging_(paging), arena_(arena), slice_(slice), direction_(direction), grain_(grain) {
    need_of_file_.resize(paging.regions().size(), 0);
}

bool Plan::next(Round& round) {
    round.runs.clear();
    round.rows.clear();
    round.units.clear();
    round.segments.clear();
    round.needs.clear();
    segment_run_ = segment_need_ = seam_run_ = 0;
    while (round.runs.size() < grain_.round_runs && (piece_open_ || begin_piece())) {
        do {
            add_row(round);
            piece_open_ = next_row();
        } while (piece_open_ && round.runs.size() < grain_.round_runs);
        end_segment(round);
        if (!piece_open_) ++piece_;
    }
    return !round.runs.empty();
}

// Opens the piece that is next; false when there is none.
bool Plan::begin_piece() {
    while (piece_ < slice_.size()) {
        const Piece& piece = slice_[piece_];
        group_ = entry_ = 0;
        row_ = row_start_ = 0;
        next_extent_ = 0;
        extent_end_ = shift_ = 0;
        piece_begun_ = false;
        const std::uint64_t wanted = (piece.high - piece.low) / grain_.units_per_piece;
        constexpr std::uint64_t page = 4096;  // cuts keep the alignment that the runs have
        unit_bytes_ = std::clamp(wanted / page * page, grain_.least_unit_bytes, grain_.most_unit_bytes);
        while (group_ < paging_.groups().size() && paging_.groups()[group_].entries.empty()) ++group_;
        if (group_ < paging_.groups().size()) return true;
        ++piece_;
    }
    return false;
}

// Goes to the next row of the piece; false when it has none.
bool Plan::next_row() {
    const Group& group = paging_.groups()[group_];
    const Entry& entry = group.entries[entry_];
    row_start_ += group.chunk_blocks * entry.run_bytes;
    if (++row_ < entry.layers * entry.planes) return true;
    row_ = 0;
    if (++entry_ < group.entries.size()) return true;
    entry_ = 0;
    do {
        if (++group_ == paging_.groups().size()) return false;
    } while (paging_.groups()[group_].entries.empty());
    return true;
}

// The runs of all named blocks in one layer and plane.
void Plan::add_row(Round& round) {
    const Piece& piece = slice_[piece_];
    const Group& group = paging_.groups()[group_];
    const Entry& entry = group.entries[entry_];
    const Piece::Blocks& blocks = piece.blocks[group_];
    const std::uint64_t row_end = row_start_ + group.chunk_blocks * entry.run_bytes;
    if (row_end <= piece.low || row_start_ >= piece.high || blocks.ids.empty()) return;
    const Window& window = paging_.windows()[entry.window];
    const std::uint64_t base = window.offset + entry.base + row_ / entry.planes * entry.layer_stride +
                               row_ % entry.planes * entry.plane_stride;
    const Region& region = paging_.regions()[window.file];
    if (!round.rows.empty() && round.rows.back().file != window.file) seam_run_ = round.runs.size();
    round.rows.push_back({round.runs.size(), window.file});
    std::uint64_t reach = 0;
    std::uint64_t begin = row_start_ + blocks.first * entry.run_bytes;
    for (const std::int64_t id : blocks.ids) {
        const std::uint64_t head = std::max(begin, piece.low);
        const std::uint64_t tail = std::min(begin + entry.run_bytes, piece.high);
        if (head < tail) {
            const std::uint64_t at = base + static_cast<std::uint64_t>(id) * entry.block_stride + (head - begin);
            place(round, region.at(at), head, tail - head);
            reach = std::max(reach, at + (tail - head));
        }
        begin += entry.run_bytes;
    }
    // Reading, what is there may be stored; writing, a file that lost any of its registered bytes is left alone.
    if (reach != 0) add_need(round, window.file, direction_ == Direction::store ? reach : window.offset + window.size);
}

// Lays ascending bytes of the object onto its extents.
void Plan::place(Round& round, std::byte* engine, std::uint64_t head, std::uint64_t length) {
    const Piece& piece = slice_[piece_];
    while (length > 0) {
        while (head >= extent_end_) {
            assert(next_extent_ + 1 < piece.extents.size());
            shift_ = static_cast<std::uint64_t>(piece.extents[next_extent_]) - extent_end_;
            extent_end_ += static_cast<std::uint64_t>(piece.extents[next_extent_ + 1]);
            next_extent_ += 2;
        }
        const std::uint64_t part = std::min(length, extent_end_ - head);
        add_run(round, engine, arena_ + (head + shift_), part);
        engine += part;
        head += part;
        length -= part;
    }
}

// Joins what is adjacent on both sides and in one file, up to a unit; cuts what is longer.
void Plan::add_run(Round& round, std::byte* engine, std::byte* arena, std::uint64_t length) {
    if (round.runs.size() > std::max(segment_run_, seam_run_)) {
        Run& last = round.runs.back();
        if (last.engine + last.length == engine && last.arena + last.length == arena &&
            last.length + length <= unit_bytes_) {
            last.length += length;
            return;
        }
    }
    while (length > unit_bytes_) {
        round.runs.push_back({engine, arena, unit_bytes_});
        engine += unit_bytes_;
        arena += unit_bytes_;
        length -= unit_bytes_;
    }
    round.runs.push_back({engine, arena, length});
}

void Plan::add_need(Round& round, std::uint32_t file, std::uint64_t end) {
    std::size_t& at = need_of_file_[file];
    if (at >= segment_need_ && at < round.needs.size() && round.needs[at].file == file) {
        round.needs[at].end = std::max(round.needs[at].end, end);
        return;
    }
    at = round.needs.size();
    round.needs.push_back({file, end});
}

void Plan::end_segment(Round& round) {
    const auto segment = static_cast<std::uint32_t>(round.segments.size());
    const auto first_unit = static_cast<std::uint32_t>(round.units.size());
    const bool ordered = slice_[piece_].ordered;
    std::uint64_t bytes = unit_bytes_;
    for (std::size_t i = segment_run_; i < round.runs.size(); ++i) {
        if (i == segment_run_ || (!ordered && bytes + round.runs[i].length > unit_bytes_)) {
            round.units.push_back({segment, static_cast<std::uint32_t>(i), 0});
            bytes = 0;
        }
        ++round.units.back().runs;
        bytes += round.runs[i].length;
    }
    const auto units = static_cast<std::uint32_t>(round.units.size()) - first_unit;
    if (units > 0) {
        const auto needs = static_cast<std::uint32_t>(round.needs.size() - segment_need_);
        round.segments.push_back(
            {piece_, piece_begun_, first_unit, units, static_cast<std::uint32_t>(segment_need_), needs});
        piece_begun_ = true;
    }
    segment_run_ = round.runs.size();
    segment_need_ = round.needs.size();
}

}  // namespace kvgrpc
