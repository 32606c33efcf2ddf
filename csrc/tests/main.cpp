// SPDX-License-Identifier: Apache-2.0
// Runs every test, or those whose name contains the argument. Ends with 1 at the first that fails.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "testing.hpp"

namespace kvgrpc::testing {

std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    std::_Exit(1);
}

}  // namespace kvgrpc::testing

int main(int count, char** arguments) {
    const std::string_view wanted = count > 1 ? arguments[1] : "";
    for (const auto& test : kvgrpc::testing::tests()) {
        if (std::string_view(test.name).find(wanted) == std::string_view::npos) continue;
        const auto began = std::chrono::steady_clock::now();
        test.body();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        std::printf("%6.2f s  %s\n", took.count(), test.name);
        std::fflush(stdout);
    }
    return 0;
}
