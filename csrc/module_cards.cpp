// SPDX-License-Identifier: Apache-2.0
// Cards in the Python module: glue only. Types and contracts stand in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "card.hpp"
#include "check.hpp"
#include "device_copy.hpp"
#include "event_poll.hpp"
#include "module.hpp"
#include "paged_copy_source.hpp"

namespace nb = nanobind;

namespace kvgrpc {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// Made and ended with the interpreter lock released, since the driver may be busy. Its last user has the lock.
template <typename T, typename... Arguments>
std::shared_ptr<T> made(Arguments&&... arguments) {
    const nb::gil_scoped_release unlocked;
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](T* ended) {
        const nb::gil_scoped_release unlocked_too;
        delete ended;
    });
}

cuda::MemHandle handle_of(const nb::bytes& bytes) {
    cuda::MemHandle handle{};
    require(bytes.size() == sizeof(handle.bytes), "a CUDA IPC handle has 64 bytes");
    std::memcpy(handle.bytes, bytes.c_str(), sizeof(handle.bytes));
    return handle;
}

std::shared_ptr<IpcEvent> open_event(std::shared_ptr<Card> card, const nb::bytes& bytes) {
    cuda::EventHandle handle{};
    require(bytes.size() == sizeof(handle.bytes), "the CUDA IPC handle of an event has 64 bytes");
    std::memcpy(handle.bytes, bytes.c_str(), sizeof(handle.bytes));
    return made<IpcEvent>(std::move(card), handle);
}

std::pair<cuda::Pointer, std::uint64_t> open(const Card& card, const nb::bytes& bytes) {
    const cuda::MemHandle handle = handle_of(bytes);
    const nb::gil_scoped_release unlocked;
    return card.open(handle);
}

void pin(const Card& card, const Memory& memory) {
    const nb::gil_scoped_release unlocked;
    card.pin(bytes_of(memory), memory.size());
}

void unpin(const Card& card, const Memory& memory) {
    const nb::gil_scoped_release unlocked;
    card.unpin(bytes_of(memory));
}

nb::tuple exported(cuda::Pointer pointer) {
    Exported found;
    {
        const nb::gil_scoped_release unlocked;
        found = export_memory(pointer);
    }
    return nb::make_tuple(nb::bytes(found.handle.bytes, sizeof(found.handle.bytes)), found.uuid, found.offset,
                          found.size);
}

std::uint64_t context_here() { return reinterpret_cast<std::uint64_t>(current_context()); }

void use_context_here(std::uint64_t context) { use_context(reinterpret_cast<cuda::Context>(context)); }

std::vector<std::tuple<int, std::string, std::string, std::string>> cards() {
    std::vector<std::tuple<int, std::string, std::string, std::string>> found;
    for (const CardFacts& card : list_cards()) found.emplace_back(card.ordinal, card.uuid, card.name, card.bus_id);
    return found;
}

std::shared_ptr<DeviceMapping> map_device(std::shared_ptr<Card> card,
                                          const std::vector<std::pair<cuda::Pointer, std::uint64_t>>& regions,
                                          const std::vector<WindowWords>& windows,
                                          const std::vector<std::vector<GroupWords>>& parts, int mode) {
    require(mode >= 0 && mode <= 2, "there are three ways to copy");
    std::vector<Region> placed;
    for (const auto& [pointer, size] : regions) placed.push_back({reinterpret_cast<std::byte*>(pointer), 0, size});
    std::vector<Paging> pagings;
    for (const auto& groups : parts) pagings.emplace_back(placed, windows_of(windows), groups_of(groups));
    return made<DeviceMapping>(std::move(card), std::move(pagings), static_cast<Mode>(mode));
}

// Keeps the arena's memory for as long as it copies.
class PyDeviceCopier {
  public:
    PyDeviceCopier(std::shared_ptr<Card> card, Memory arena, std::uint64_t part_bytes, std::uint64_t step_bytes,
                   unsigned steps)
        : arena_(std::move(arena)),
          copier_(std::make_shared<DeviceCopier>(std::move(card), bytes_of(*arena_), arena_->size(), part_bytes,
                                                 RingShape{step_bytes, steps})) {}

    DeviceCopier& get() const {
        require(copier_ != nullptr, "the copier is closed");
        return *copier_;
    }
    std::shared_ptr<DeviceCopier> share() const { return copier_; }

    void close() {
        copier_.reset();
        arena_.reset();
    }

  private:
    std::optional<Memory> arena_;
    std::shared_ptr<DeviceCopier> copier_;
};

// A flight and all that it flies over.
class PyFlight {
  public:
    PyFlight(std::shared_ptr<DeviceCopier> copier, std::shared_ptr<DeviceMapping> mapping,
             std::unique_ptr<Flight> flight)
        : copier_(std::move(copier)), mapping_(std::move(mapping)), flight_(std::move(flight)) {}

    bool failed() const { return !flight_->error().empty(); }

    std::tuple<std::uint64_t, int, bool, std::string> wait() {
        const Report report = flight_->wait();
        return {report.completed, static_cast<int>(report.stop), report.torn, flight_->error()};
    }

  private:
    std::shared_ptr<DeviceCopier> copier_;
    std::shared_ptr<DeviceMapping> mapping_;
    std::unique_ptr<Flight> flight_;
};

std::unique_ptr<PyFlight> launch(const PyDeviceCopier& copier, std::shared_ptr<DeviceMapping> mapping, std::size_t part,
                                 const Words& words, bool retrieve) {
    const std::span<const std::int64_t> numbers(words.data(), words.size());
    copier.get();
    std::shared_ptr<DeviceCopier> shared = copier.share();
    const nb::gil_scoped_release unlocked;
    auto flight = shared->launch(*mapping, part, numbers, retrieve ? Direction::retrieve : Direction::store);
    return std::make_unique<PyFlight>(std::move(shared), std::move(mapping), std::move(flight));
}

void load(const PyDeviceCopier& copier, std::uint64_t function, unsigned staged_blocks, unsigned direct_blocks) {
    copier.get().load({reinterpret_cast<cuda::Function>(function), staged_blocks, direct_blocks});
}

}  // namespace

void bind_cards(nb::module_& module) {
    using namespace nb::literals;

    module.attr("PAGED_COPY_SOURCE") = paged_copy_source;
    module.attr("PAGED_COPY_NAME") = "paged_copy";
    module.def("cards", &cards, Unlocked());
    module.def("export_memory", &exported, "pointer"_a);
    module.def("current_context", &context_here, Unlocked());
    module.def("use_context", &use_context_here, "context"_a, Unlocked());
    nb::class_<Card>(module, "Card")
        .def(nb::init<int>(), "ordinal"_a, Unlocked())
        .def("open", &open, "handle"_a)
        .def("close", &Card::close, "pointer"_a, Unlocked())
        .def("pin", &pin, "memory"_a)
        .def("unpin", &unpin, "memory"_a)
        .def("memory", &Card::memory, Unlocked());
    nb::class_<IpcEvent>(module, "IpcEvent").def(nb::new_(&open_event), "card"_a, "handle"_a);
    nb::class_<EventPoll>(module, "EventPoll")
        .def(nb::init<>())
        .def("add", &EventPoll::add, "key"_a, "event"_a, Unlocked())
        .def("drop", &EventPoll::drop, "key"_a, Unlocked())
        .def("wait", &EventPoll::wait, Unlocked())
        .def("close", &EventPoll::close, Unlocked());
    nb::class_<DeviceMapping>(module, "DeviceMapping")
        .def(nb::new_(&map_device), "card"_a, "regions"_a, "windows"_a, "parts"_a, "mode"_a);
    nb::class_<PyFlight>(module, "Flight")
        .def("wait", &PyFlight::wait, Unlocked())
        .def_prop_ro("failed", &PyFlight::failed);
    nb::class_<PyDeviceCopier>(module, "DeviceCopier")
        .def(nb::init<std::shared_ptr<Card>, Memory, std::uint64_t, std::uint64_t, unsigned>(), "card"_a, "arena"_a,
             "part_bytes"_a, "step_bytes"_a = std::uint64_t{16} << 20, "steps"_a = 4)
        .def("load", &load, "function"_a, "staged_blocks"_a = 32, "direct_blocks"_a = 8)
        .def("launch", &launch, "mapping"_a, "part"_a, "words"_a, "retrieve"_a)
        .def("close", &PyDeviceCopier::close, Unlocked());
}

}  // namespace kvgrpc
