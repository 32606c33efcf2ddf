// SPDX-License-Identifier: Apache-2.0
//
// Order. Slices of one mapping and direction go to one stream, those of one that uses kernels to the belt of their
// direction, so one is done before the next that was launched. Inside a slice runs go in any order; where two of them
// have one target, one after the other.
#include "device_copy.hpp"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ranges>
#include <unordered_set>
#include <utility>

#include "check.hpp"

namespace kvgrpc {
namespace {

using cuda::driver;

constexpr std::uint64_t unit_bytes = 8192;  // of a warp; more only makes the last ones late
constexpr std::size_t table_units = 32768;  // of a step
constexpr unsigned threads_a_block = 512;
constexpr int stream_order = 1;               // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
constexpr unsigned overlap_with_compute = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
constexpr unsigned portable = 1;              // CU_MEMHOSTALLOC_PORTABLE
constexpr long nap_ns = 5000;
constexpr std::chrono::microseconds spin(30);
constexpr int rounds_in_flight = 4;

cuda::Pointer address(const void* host) { return reinterpret_cast<cuda::Pointer>(host); }

// Runs of a plan are not cut but at the borders of pinned parts.
Grain whole_runs() {
    Grain grain;
    grain.least_unit_bytes = grain.most_unit_bytes = std::uint64_t{1} << 62;
    return grain;
}

// Whether a block is written twice by the slice. Parts of one chunk name the same blocks and other bytes of them.
bool has_repeats(const Slice& slice) {
    if (std::ranges::any_of(slice, [](const Piece& piece) { return piece.ordered; })) return true;
    for (std::size_t group = 0; !slice.empty() && group < slice.front().blocks.size(); ++group) {
        std::unordered_set<std::int64_t> seen;
        for (std::size_t i = 0; i < slice.size(); ++i) {
            const auto ids = slice[i].blocks[group].ids;
            const bool goes_on = i > 0 && slice[i].low == slice[i - 1].high && slice[i].low > 0 &&
                                 std::ranges::equal(ids, slice[i - 1].blocks[group].ids);
            if (goes_on) continue;
            for (const std::int64_t id : ids) {
                if (!seen.insert(id).second) return true;
            }
        }
    }
    return false;
}

}  // namespace

DeviceMapping::DeviceMapping(std::shared_ptr<const Card> card, std::vector<Paging> parts, Mode mode)
    : card_(std::move(card)), parts_(std::move(parts)), mode_(mode) {
    const Card::Current current(*card_);
    for (auto& stream : streams_) stream = std::make_unique<CardStream>();
}

DeviceMapping::~DeviceMapping() {
    const Card::Current current(*card_);
    for (auto& stream : streams_) stream.reset();
}

const Paging& DeviceMapping::part(std::size_t number) const {
    require(number < parts_.size(), "a chunk has no such part");
    return parts_[number];
}

Flight::Flight(DeviceCopier& copier, std::uint64_t pieces) : copier_(copier) { report_.completed = pieces; }

Flight::~Flight() {
    if (!over_) wait();
}

void Flight::fail(const std::string& error) noexcept {
    report_ = {0, Stop::io, begun_};
    error_ = error;
}

Report Flight::wait() {
    if (over_) return report_;
    prctl(PR_SET_TIMERSLACK, 1UL);
    const Card::Current current(*copier_.card_);
    const auto began = std::chrono::steady_clock::now();
    while (ended_ != nullptr) {
        const cuda::Result result = driver().cuEventQuery(ended_->get());
        if (result == cuda::success) break;
        if (result != cuda::not_ready) {
            fail(cuda::CudaError("cuEventQuery", result).what());
            break;
        }
        if (std::chrono::steady_clock::now() - began < spin) continue;
        const timespec nap{0, nap_ns};
        nanosleep(&nap, nullptr);
    }
    over_ = true;
    ended_.reset();
    give_tables();
    return report_;
}

void Flight::give_tables() noexcept {
    for (void* table : tables_) copier_.give_table(table);
    tables_.clear();
}

DeviceCopier::DeviceCopier(std::shared_ptr<const Card> card, std::byte* arena, std::uint64_t arena_bytes,
                           std::uint64_t part_bytes, RingShape shape)
    : card_(std::move(card)), arena_(arena), arena_bytes_(arena_bytes), part_bytes_(part_bytes), shape_(shape) {
    require(part_bytes > 0 && shape.steps > 0 && shape.step_bytes >= unit_bytes, "parts and steps hold something");
}

DeviceCopier::~DeviceCopier() {
    const Card::Current current(*card_);
    for (Belt& belt : belts_) {
        for (Step& step : belt.steps) {
            driver().cuMemFree_v2(step.ring);
            driver().cuMemFree_v2(step.units);
        }
        belt.steps.clear();
        belt.kernels.reset();
        belt.engines.reset();
    }
    for (void* table : tables_) driver().cuMemFreeHost(table);
}

void DeviceCopier::load(const KernelOptions& kernel) { kernel_ = kernel; }

std::unique_ptr<Flight> DeviceCopier::launch(const DeviceMapping& mapping, std::size_t part,
                                             std::span<const std::int64_t> words, Direction direction) {
    const Paging& paging = mapping.part(part);
    const Slice slice = read_slice(words, paging, arena_bytes_, direction);
    require(mapping.mode() == Mode::dma || kernel_.function != nullptr, "the kernel was not loaded");
    auto flight = std::make_unique<Flight>(*this, slice.size());
    const Card::Current current(*card_);
    const bool in_order = direction == Direction::retrieve && has_repeats(slice);
    const bool on_belt = mapping.mode() != Mode::dma;
    const bool staged = mapping.mode() == Mode::staged;
    Belt& belt = belts_[static_cast<std::size_t>(direction)];
    // What the slice's last copies go to. A belt's streams are there once it is prepared.
    const auto last_stream = [&] {
        if (!on_belt) return mapping.stream(direction);
        return staged && direction == Direction::store ? belt.engines->get() : belt.kernels->get();
    };
    // What was launched must have ended before anybody is told.
    const auto settle = [&] {
        flight->ended_.reset();
        if (!flight->begun_) return;
        if (on_belt) driver().cuStreamSynchronize(belt.kernels->get());
        driver().cuStreamSynchronize(on_belt ? belt.engines->get() : mapping.stream(direction));
    };
    Plan plan(paging, arena_, slice, direction, whole_runs());
    const Parts parts{arena_, part_bytes_};
    Round round;
    std::vector<Run> runs;
    std::vector<Grid> grids;
    try {
        for (int rounds = 1; plan.next(round); ++rounds) {
            runs.clear();
            grids.clear();
            if (in_order) {
                cut_runs(round, parts, runs);
                if (on_belt) prepare(belt, staged);
                launch_in_order(*flight, last_stream(), runs, direction);
            } else if (on_belt) {
                cut_runs(round, parts, runs);
                launch_kernels(*flight, runs, direction, staged);
            } else {
                find_grids(round, parts, grids, runs);
                launch_grids(*flight, last_stream(), grids, direction);
                launch_dma(*flight, last_stream(), runs, direction);
            }
            if (rounds % rounds_in_flight == 0) {
                KVGRPC_CUDA(cuStreamSynchronize, last_stream());
                flight->give_tables();
            }
        }
        if (flight->begun_) {
            flight->ended_ = std::make_unique<CardEvent>();
            KVGRPC_CUDA(cuEventRecord, flight->ended_->get(), last_stream());
        }
    } catch (const cuda::CudaError& error) {
        settle();
        flight->fail(error.what());
    } catch (...) {
        settle();
        throw;
    }
    return flight;
}

void DeviceCopier::launch_dma(Flight& flight, cuda::Stream stream, std::span<const Run> runs, Direction direction) {
    if (runs.empty()) return;
    if (driver().cuMemcpyBatchAsync == nullptr || runs.size() == 1) {
        launch_in_order(flight, stream, runs, direction);
        return;
    }
    std::vector<cuda::Pointer> engine(runs.size());
    std::vector<cuda::Pointer> arena(runs.size());
    std::vector<std::size_t> sizes(runs.size());
    for (std::size_t i = 0; i < runs.size(); ++i) {
        engine[i] = address(runs[i].engine);
        arena[i] = address(runs[i].arena);
        sizes[i] = runs[i].length;
    }
    const bool store = direction == Direction::store;
    cuda::CopyAttributes attributes{stream_order, {0, 0}, {0, 0}, overlap_with_compute};
    std::size_t first = 0;
    std::size_t failed = 0;
    flight.begun_ = true;
    KVGRPC_CUDA(cuMemcpyBatchAsync, (store ? arena : engine).data(), (store ? engine : arena).data(), sizes.data(),
                runs.size(), &attributes, &first, 1, &failed, stream);
}

void DeviceCopier::launch_grids(Flight& flight, cuda::Stream stream, std::span<const Grid> grids, Direction direction) {
    for (const Grid& grid : grids) {
        cuda::Copy2D copy{};
        copy.width_bytes = grid.width;
        copy.height = grid.rows;
        if (direction == Direction::store) {
            copy.source_type = cuda::device_memory;
            copy.source_device = address(grid.engine);
            copy.source_pitch = grid.engine_pitch;
            copy.target_type = cuda::host_memory;
            copy.target_host = grid.arena;
            copy.target_pitch = grid.arena_pitch;
        } else {
            copy.source_type = cuda::host_memory;
            copy.source_host = grid.arena;
            copy.source_pitch = grid.arena_pitch;
            copy.target_type = cuda::device_memory;
            copy.target_device = address(grid.engine);
            copy.target_pitch = grid.engine_pitch;
        }
        flight.begun_ = true;
        KVGRPC_CUDA(cuMemcpy2DAsync_v2, &copy, stream);
    }
}

void DeviceCopier::launch_in_order(Flight& flight, cuda::Stream stream, std::span<const Run> runs,
                                   Direction direction) {
    for (const Run& run : runs) {
        const cuda::Pointer engine = address(run.engine);
        const cuda::Pointer arena = address(run.arena);
        const bool store = direction == Direction::store;
        KVGRPC_CUDA(cuMemcpyAsync, store ? arena : engine, store ? engine : arena, run.length, stream);
        flight.begun_ = true;
    }
}

void DeviceCopier::launch_kernels(Flight& flight, std::span<const Run> runs, Direction direction, bool staged) {
    Belt& belt = belts_[static_cast<std::size_t>(direction)];
    prepare(belt, staged);
    const std::lock_guard lock(belt.mutex);
    std::vector<Unit> units;
    std::vector<Stretch> stretches;
    std::uint64_t used = 0;
    const auto end_step = [&] {
        if (!units.empty()) launch_step(flight, belt, units, stretches, direction);
        units.clear();
        stretches.clear();
        used = 0;
    };
    for (const Run& run : runs) {
        Run rest = run;
        while (rest.length > 0) {
            if (units.size() == table_units || (staged && used + 16 >= shape_.step_bytes)) end_step();
            std::uint64_t length = std::min(rest.length, unit_bytes);
            cuda::Pointer other = address(rest.arena);
            if (staged) {
                const bool new_part = static_cast<std::uint64_t>(rest.arena - arena_) % part_bytes_ == 0;
                const bool goes_on =
                    !new_part && !stretches.empty() && stretches.back().arena + stretches.back().length == rest.arena;
                if (!goes_on) {
                    used = (used + 15) / 16 * 16;
                    stretches.push_back({rest.arena, belt.steps[belt.next].ring + used, 0});
                }
                length = std::min(length, shape_.step_bytes - used);
                other = belt.steps[belt.next].ring + used;
                stretches.back().length += length;
                used += length;
            }
            units.push_back({address(rest.engine), other, length});
            rest.engine += length;
            rest.arena += length;
            rest.length -= length;
        }
    }
    end_step();
}

void DeviceCopier::launch_step(Flight& flight, Belt& belt, std::span<const Unit> units,
                               std::span<const Stretch> stretches, Direction direction) {
    Step& step = belt.steps[belt.next];
    belt.next = (belt.next + 1) % belt.steps.size();
    const bool staged = !stretches.empty();
    const bool store = direction == Direction::store;
    const cuda::Stream kernels = belt.kernels->get();
    const cuda::Stream engines = belt.engines->get();
    void* table = take_table();
    flight.tables_.push_back(table);
    std::memcpy(table, units.data(), units.size_bytes());
    KVGRPC_CUDA(cuStreamWaitEvent, kernels, step.empty->get(), 0);
    flight.begun_ = true;
    KVGRPC_CUDA(cuMemcpyAsync, step.units, address(table), units.size_bytes(), kernels);
    if (staged && !store) {
        KVGRPC_CUDA(cuStreamWaitEvent, engines, step.empty->get(), 0);
        for (const Stretch& one : stretches) {
            KVGRPC_CUDA(cuMemcpyAsync, one.ring, address(one.arena), one.length, engines);
        }
        KVGRPC_CUDA(cuEventRecord, step.full->get(), engines);
        KVGRPC_CUDA(cuStreamWaitEvent, kernels, step.full->get(), 0);
    }
    constexpr std::size_t warps = threads_a_block / 32;
    const unsigned most = staged ? kernel_.staged_blocks : kernel_.direct_blocks;
    const auto blocks = static_cast<unsigned>(std::min<std::size_t>((units.size() + warps - 1) / warps, most));
    auto count = static_cast<unsigned>(units.size());
    int to_engine = store ? 0 : 1;
    std::array<void*, 3> parameters{&step.units, &count, &to_engine};
    KVGRPC_CUDA(cuLaunchKernel, kernel_.function, blocks, 1, 1, threads_a_block, 1, 1, 0, kernels, parameters.data(),
                nullptr);
    if (staged && store) {
        KVGRPC_CUDA(cuEventRecord, step.full->get(), kernels);
        KVGRPC_CUDA(cuStreamWaitEvent, engines, step.full->get(), 0);
        for (const Stretch& one : stretches) {
            KVGRPC_CUDA(cuMemcpyAsync, address(one.arena), one.ring, one.length, engines);
        }
        KVGRPC_CUDA(cuEventRecord, step.empty->get(), engines);
    } else {
        KVGRPC_CUDA(cuEventRecord, step.empty->get(), kernels);
    }
}

void DeviceCopier::prepare(Belt& belt, bool staged) {
    const std::lock_guard lock(belt.mutex);
    if (belt.kernels == nullptr) {
        auto kernels = std::make_unique<CardStream>();
        belt.engines = std::make_unique<CardStream>();
        belt.kernels = std::move(kernels);
    }
    while (belt.steps.size() < shape_.steps) {
        Step step;
        step.full = std::make_unique<CardEvent>();
        step.empty = std::make_unique<CardEvent>();
        KVGRPC_CUDA(cuMemAlloc_v2, &step.units, table_units * sizeof(Unit));
        belt.steps.push_back(std::move(step));
    }
    if (!staged || belt.staged) return;
    for (Step& step : belt.steps) {
        if (step.ring == 0) KVGRPC_CUDA(cuMemAlloc_v2, &step.ring, shape_.step_bytes);
    }
    belt.staged = true;
}

void* DeviceCopier::take_table() {
    {
        const std::lock_guard lock(tables_mutex_);
        if (!tables_.empty()) {
            void* table = tables_.back();
            tables_.pop_back();
            return table;
        }
    }
    void* table = nullptr;
    KVGRPC_CUDA(cuMemHostAlloc, &table, table_units * sizeof(Unit), portable);
    return table;
}

void DeviceCopier::give_table(void* table) noexcept {
    const std::lock_guard lock(tables_mutex_);
    tables_.push_back(table);
}

}  // namespace kvgrpc
