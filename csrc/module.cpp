// SPDX-License-Identifier: Apache-2.0
// The Python module kvgrpc.transfer._native: glue only. Its types and contracts stand in _native.pyi.
#include "module.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "check.hpp"
#include "host_copy.hpp"
#include "layout.hpp"
#include "mapped_file.hpp"

namespace nb = nanobind;

namespace kvgrpc {
namespace {

using FileWords = std::tuple<int, std::uint64_t, std::uint64_t>;

std::unique_ptr<Mapping> make_mapping(const std::vector<FileWords>& files, const std::vector<WindowWords>& windows,
                                      const std::vector<GroupWords>& groups) {
    std::vector<MappedFile> mapped;
    mapped.reserve(files.size());
    for (const auto& [fd, offset, length] : files) mapped.emplace_back(fd, offset, length);
    return std::make_unique<Mapping>(std::move(mapped), windows_of(windows), groups_of(groups));
}

// A mapping that can be closed before Python lets go of it.
class PyMapping {
  public:
    PyMapping(const std::vector<FileWords>& files, const std::vector<WindowWords>& windows,
              const std::vector<GroupWords>& groups)
        : mapping_(make_mapping(files, windows, groups)) {}

    const Mapping& get() const {
        require(mapping_ != nullptr, "the mapping is closed");
        return *mapping_;
    }

    void populate(double most_s) const {
        const auto most =
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(most_s));
        const auto deadline = std::chrono::steady_clock::now() + most;
        for (const MappedFile& file : get().files()) file.populate(deadline);
    }

    void close() { mapping_.reset(); }

  private:
    std::unique_ptr<Mapping> mapping_;
};

// Keeps the arena's memory for as long as it copies.
class PyCopier {
  public:
    PyCopier(Memory arena, unsigned threads, std::uint64_t stream_bytes, std::uint64_t bytes_a_hand)
        : arena_(std::move(arena)),
          copier_(std::make_unique<HostCopier>(bytes_of(*arena_), arena_->size(),
                                               CopyOptions{threads, stream_bytes, bytes_a_hand})) {}

    std::tuple<std::uint64_t, int, bool> copy(const PyMapping& mapping, const Words& words, bool retrieve,
                                              const std::optional<std::function<void()>>& pace) const {
        const std::span<const std::int64_t> numbers(words.data(), words.size());
        const Direction direction = retrieve ? Direction::retrieve : Direction::store;
        const HostCopier& copier = get();
        const nb::gil_scoped_release unlocked;
        const Report report = const_cast<HostCopier&>(copier).copy(mapping.get(), numbers, direction,
                                                                   pace ? *pace : std::function<void()>{});
        return {report.completed, static_cast<int>(report.stop), report.torn};
    }

    const HostCopier& get() const {
        require(copier_ != nullptr, "the copier is closed");
        return *copier_;
    }

    void close() {
        copier_.reset();
        arena_.reset();
    }

  private:
    std::optional<Memory> arena_;
    std::unique_ptr<HostCopier> copier_;
};

bool touch_memory(const Memory& memory) {
    const nb::gil_scoped_release unlocked;
    return touch(bytes_of(memory), memory.size());
}

}  // namespace
}  // namespace kvgrpc

NB_MODULE(_native, module) {
    using namespace nb::literals;
    using kvgrpc::PyCopier;
    using kvgrpc::PyMapping;

    nb::set_leak_warnings(false);  // what lives until the interpreter ends is no leak
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const std::system_error& refused) {
            errno = refused.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
        }
    });
    module.attr("SOURCE_DIGEST") = KVGRPC_SOURCE_DIGEST;
    nb::class_<PyMapping>(module, "Mapping")
        .def(nb::init<const std::vector<kvgrpc::FileWords>&, const std::vector<kvgrpc::WindowWords>&,
                      const std::vector<kvgrpc::GroupWords>&>(),
             "files"_a, "windows"_a, "groups"_a)
        .def("populate", &PyMapping::populate, "most_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &PyMapping::close, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<PyCopier>(module, "HostCopier")
        .def(nb::init<kvgrpc::Memory, unsigned, std::uint64_t, std::uint64_t>(), "arena"_a, "threads"_a = 0,
             "stream_bytes"_a = 0, "bytes_a_hand"_a = std::uint64_t{1} << 20)
        .def("copy", &PyCopier::copy, "mapping"_a, "words"_a, "retrieve"_a, "pace"_a = nb::none())
        .def("close", &PyCopier::close)
        .def_prop_ro("threads", [](const PyCopier& copier) { return copier.get().threads(); })
        .def_prop_ro("stream_bytes", [](const PyCopier& copier) { return copier.get().stream_bytes(); });
    module.def("touch", &kvgrpc::touch_memory, "memory"_a);
    kvgrpc::bind_cards(module);
}
