// SPDX-License-Identifier: Apache-2.0
//
// Order. Units are taken in order, and the one that ends the last of a segment looks at the sizes of the files again.
// What is written to an engine is written segment by segment: a unit waits until its segment's turn, so that after a
// failure later blocks are untouched. What is written to the arena may run ahead, for nobody reads it before it is
// reported. A failure stops what comes after it; what comes before it has been taken and is ended; the first failure is
// reported. That makes `completed` and `torn` exact, however many threads take part.
#include "host_copy.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "bus_guard.hpp"
#include "check.hpp"
#include "stream_copy.hpp"

namespace kvgrpc {
namespace {

constexpr int patience = 2000;  // looks at the turn, some ten microseconds, before a thread goes to sleep
constexpr std::chrono::microseconds stall(500);  // a unit takes a tenth of that: whoever has it lost its core

void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Way {
    Direction direction;
    bool streaming;
};

std::byte* target_of(const Run& run, Direction direction) noexcept {
    return direction == Direction::store ? run.arena : run.engine;
}

const std::byte* source_of(const Run& run, Direction direction) noexcept {
    return direction == Direction::store ? run.engine : run.arena;
}

// Moves runs until a fault.
BusFault move_runs(std::span<const Run> runs, Way way) noexcept {
    BusGuard guard;
    if (sigsetjmp(guard.jump, 0) == 0) {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            const Run& run = runs[i];
            guard.watch(run.engine, run.arena, run.length);
            std::byte* target = target_of(run, way.direction);
            const std::byte* source = source_of(run, way.direction);
            if (way.streaming) {
                const Run& next = runs[i + 1 < runs.size() ? i + 1 : i];
                stream_copy(target, source, run.length, target_of(next, way.direction), source_of(next, way.direction));
            } else {
                std::memcpy(target, source, run.length);
            }
        }
    }
    if (way.streaming) stream_fence();
    return guard.fault();
}

// One round, copied by whoever calls `work`.
class RoundCopy {
  public:
    RoundCopy(const Mapping& mapping, const Round& round, Way way)
        : mapping_(mapping), round_(round), way_(way), states_(round.segments.size()) {
        for (std::size_t i = 0; i < states_.size(); ++i) states_[i].left = round.segments[i].units;
    }

    void work() {
        const bool helps = std::this_thread::get_id() != caller_;
        while (!helps || !contended_.load(std::memory_order_relaxed)) {
            const std::uint32_t index = cursor_.fetch_add(1, std::memory_order_relaxed);
            if (index >= round_.units.size()) return;
            const Unit& unit = round_.units[index];
            if (way_.direction == Direction::retrieve) wait_turn(unit.segment);
            if (unit.segment > failed_.load(std::memory_order_acquire)) return;
            State& state = states_[unit.segment];
            if (may_begin(unit.segment)) {
                state.moved.store(true, std::memory_order_relaxed);
                const BusFault fault = move_runs(std::span(round_.runs).subspan(unit.first_run, unit.runs), way_);
                if (fault != BusFault::none) fail(unit.segment, Stop::io);
            }
            if (state.left.fetch_sub(1, std::memory_order_acq_rel) == 1) close(unit.segment);
        }
    }

    // The same by one thread, a run at a time.
    void work_paced(const std::function<void()>& pace) {
        for (std::uint32_t i = 0; i < round_.segments.size() && !has_failed(); ++i) {
            for (const Run& run : runs_of(round_.segments[i])) {
                pace();
                states_[i].opened = false;
                if (!may_begin(i)) break;
                states_[i].moved = true;
                if (move_runs({&run, 1}, way_) != BusFault::none) {
                    fail(i, Stop::io);
                    break;
                }
            }
            close(i);
        }
    }

    // When nobody works any more.
    bool has_failed() const { return failed_.load(std::memory_order_relaxed) != none; }

    Report report() const {
        const std::uint32_t index = failed_.load(std::memory_order_relaxed);
        const Segment& segment = round_.segments[index];
        const State& state = states_[index];
        return {segment.piece, state.stop.load(), segment.begun || state.moved.load()};
    }

  private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();

    struct State {
        std::atomic<std::uint32_t> left{0};  // units that have not ended
        std::atomic<bool> opened{false};     // the sizes were good before the first byte
        std::atomic<bool> moved{false};
        std::atomic<Stop> stop{Stop::none};
    };

    // Until the segment's turn, or a failure before it.
    void wait_turn(std::uint32_t segment) {
        std::uint32_t turn = turn_.load(std::memory_order_acquire);
        for (int looks = 0; turn < segment && looks < patience; ++looks) {
            relax();
            turn = turn_.load(std::memory_order_acquire);
        }
        if (turn >= segment) return;
        const auto began = std::chrono::steady_clock::now();
        for (; turn < segment; turn = turn_.load(std::memory_order_acquire)) {
            turn_.wait(turn, std::memory_order_acquire);
        }
        if (std::chrono::steady_clock::now() - began > stall) contended_.store(true, std::memory_order_relaxed);
    }

    // Whether bytes of the segment may move, as far as is known.
    bool may_begin(std::uint32_t segment) {
        State& state = states_[segment];
        if (state.stop.load(std::memory_order_relaxed) != Stop::none) return false;
        if (state.opened.load(std::memory_order_relaxed)) return true;
        if (!long_enough(round_.segments[segment])) {
            fail(segment, Stop::truncated);
            return false;
        }
        state.opened.store(true, std::memory_order_relaxed);
        return true;
    }

    bool long_enough(const Segment& segment) const {
        return std::ranges::all_of(round_.needs_of(segment), [&](const Need& need) {
            return mapping_.files()[need.file].file_size() >= need.end;
        });
    }

    std::span<const Run> runs_of(const Segment& segment) const {
        const Unit& first = round_.units[segment.first_unit];
        const Unit& last = round_.units[segment.first_unit + segment.units - 1];
        return std::span(round_.runs).subspan(first.first_run, last.first_run + last.runs - first.first_run);
    }

    // All units of the segment have ended. Bytes beyond a new end of a file in its last page can be touched without a
    // fault, so the sizes count here too; and where a fault met a file that is too short, that was why.
    void close(std::uint32_t segment) {
        if (!long_enough(round_.segments[segment])) fail(segment, Stop::truncated);
        if (way_.direction == Direction::store) return;
        const bool failed = states_[segment].stop.load(std::memory_order_relaxed) != Stop::none;
        turn_.store(failed ? none : segment + 1, std::memory_order_release);
        turn_.notify_all();
    }

    void fail(std::uint32_t segment, Stop why) {
        states_[segment].stop.store(why, std::memory_order_relaxed);
        std::uint32_t first = failed_.load(std::memory_order_relaxed);
        while (segment < first && !failed_.compare_exchange_weak(first, segment, std::memory_order_acq_rel)) {
        }
    }

    const Mapping& mapping_;
    const Round& round_;
    const Way way_;
    const std::thread::id caller_ = std::this_thread::get_id();
    std::vector<State> states_;
    std::atomic<std::uint32_t> cursor_{0};
    std::atomic<std::uint32_t> turn_{0};  // of a segment that is written to an engine
    // Threads that wait for each other without a core each are slower than one: from here on the caller goes on alone.
    std::atomic<bool> contended_{false};
    std::atomic<std::uint32_t> failed_{none};  // the first segment that did
};

std::uint64_t bytes_of(const Slice& slice) {
    std::uint64_t bytes = 0;
    for (const Piece& piece : slice) bytes += piece.high - piece.low;
    return bytes;
}

unsigned chosen_threads(unsigned wanted) {
    if (wanted != 0) return wanted;
    return std::clamp(std::thread::hardware_concurrency(), 1U, 4U);
}

std::uint64_t chosen_stream_bytes(std::uint64_t wanted) {
    if (wanted != 0) return wanted;
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    constexpr std::uint64_t unknown = std::uint64_t{32} << 20;
    return (cache > 0 ? static_cast<std::uint64_t>(cache) : unknown) / 2;
}

}  // namespace

HostCopier::HostCopier(std::byte* arena, std::uint64_t arena_bytes, const CopyOptions& options)
    : arena_(arena),
      arena_bytes_(arena_bytes),
      stream_bytes_(chosen_stream_bytes(options.stream_bytes)),
      bytes_a_hand_(std::max<std::uint64_t>(options.bytes_a_hand, 1)),
      team_(chosen_threads(options.threads)) {}

Report HostCopier::copy(const Mapping& mapping, std::span<const std::int64_t> words, Direction direction,
                        const std::function<void()>& pace) {
    const Slice slice = read_slice(words, mapping, arena_bytes_, direction);
    const std::uint64_t bytes = bytes_of(slice);
    const Way way{direction, bytes >= stream_bytes_};
    const auto hands = static_cast<unsigned>(std::min<std::uint64_t>(bytes / bytes_a_hand_, team_.size() - 1));
    Grain grain;
    if (pace) {
        grain.least_unit_bytes = grain.most_unit_bytes = std::uint64_t{1} << 62;
    } else {
        grain.units_per_piece = 4 * (hands + 1);
    }
    BusGuard::install();
    Plan plan(mapping, arena_, slice, direction, grain);
    Round round;
    while (plan.next(round)) {
        RoundCopy copy(mapping, round, way);
        if (pace) {
            copy.work_paced(pace);
        } else {
            team_.run([&copy] { copy.work(); }, hands);
        }
        if (copy.has_failed()) return copy.report();
    }
    return {slice.size(), Stop::none, false};
}

}  // namespace kvgrpc
