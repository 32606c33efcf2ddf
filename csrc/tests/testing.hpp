// SPDX-License-Identifier: Apache-2.0
// Tests that register themselves, and what they say when they fail.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace kvgrpc::testing {

struct Test {
    const char* name;
    void (*body)();
};

std::vector<Test>& tests();

struct Registration {
    Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

[[noreturn]] void fail(const char* file, int line, const std::string& what);

}  // namespace kvgrpc::testing

#define TEST(name)                                                             \
    static void name();                                                        \
    static const kvgrpc::testing::Registration registered_##name(#name, name); \
    static void name()

#define EXPECT(condition)                                                        \
    do {                                                                         \
        if (!(condition)) kvgrpc::testing::fail(__FILE__, __LINE__, #condition); \
    } while (false)

#define EXPECT_REFUSED(expression, words)                                                             \
    do {                                                                                              \
        bool as_said = false;                                                                         \
        try {                                                                                         \
            (void)(expression);                                                                       \
        } catch (const kvgrpc::BadRequest& error) {                                                   \
            as_said = std::string(error.what()).find(words) != std::string::npos;                     \
            if (!as_said) kvgrpc::testing::fail(__FILE__, __LINE__, error.what());                    \
        }                                                                                             \
        if (!as_said) kvgrpc::testing::fail(__FILE__, __LINE__, "nothing was refused: " #expression); \
    } while (false)
