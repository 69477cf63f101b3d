// The thread that runs the engine of a server, and requests of other threads.
#include "serve/service.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "dev/tests/generation_fixture.h"
#include "dev/tests/tokenizer_fixture.h"

namespace {

using namespace std::chrono_literals;
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GenerationByType);  // of generation_fixture.h

// Counts what is written.
class CountingReply : public http::Reply {
  public:
    void send(int, const std::string&, std::string) override { ended = true; }
    void begin(const std::string&) override { begins = true; }
    void write(std::string_view) override { writes++; }
    void end(bool) override { ended = true; }
    void set_header(const std::string&, const std::string&) override {}
    void on_gone(std::function<void()>) override {}
    bool begun() const override { return begins; }

    std::atomic<int64_t> writes{0};
    std::atomic<bool> begins{false}, ended{false};
};

struct ServiceTest : testing::Test {
    Driver driver{long_config("SS"), training_shape(1, 8)};
    std::unique_ptr<Generation> generation;
    ServedModel model{{"m"}, tokenizer_fixture("bytes"), {}, driver.model.config, {}, true, {0}, {}, {}, 300, 0};
    std::unique_ptr<Service> service;
    std::atomic<bool> stop{false};
    std::thread thread;

    void SetUp() override {
        driver.randomise(3);
        generation = std::make_unique<Generation>(driver.model, engine_options(2, 300));
        service = std::make_unique<Service>(generation->engine, model, 8, 0);
    }
    void TearDown() override {
        stop = true;
        service->wake();
        thread.join();
    }
    void start() {
        thread = std::thread([this] { service->run([this] { return stop.load(); }, 0); });
    }
    std::shared_ptr<CountingReply> submit() {
        CompletionCall call;
        call.model = "m";
        call.prompts = {{1, 2, 3}};
        call.max_tokens = 20;
        call.stream = true;
        const auto reply = std::make_shared<CountingReply>();
        service->submit(std::make_shared<Answer>(std::move(call), model, reply, 0), "/v1/completions");
        return reply;
    }
    static bool ends(const CountingReply& reply) {
        for (int i = 0; i < 3000 && !reply.ended; i++) std::this_thread::sleep_for(10ms);
        return reply.ended;
    }
};

TEST_F(ServiceTest, MetricsKnowThePagesBeforeTheFirstRequest) {
    const int64_t pages = generation->engine.pages_available();
    EXPECT_GT(pages, 0);
    EXPECT_NE(service->metrics.text().find(str("\ntrain_gpt_pages ", pages, "\n")), std::string::npos);
    start();
}

TEST_F(ServiceTest, AStepWaitsForARequestThatIsComing) {
    service->patience = 1h;
    start();
    std::shared_ptr<void> coming = service->expect();
    const auto reply = submit();
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(reply->writes, 0);
    coming.reset();
    EXPECT_TRUE(ends(*reply));
    EXPECT_GE(reply->writes, 20);
}

TEST_F(ServiceTest, AStepDoesNotWaitForLong) {
    start();
    const std::shared_ptr<void> never = service->expect();
    const auto reply = submit();
    EXPECT_TRUE(ends(*reply));
}

TEST_F(ServiceTest, AStepDoesNotWaitForSeveral) {
    service->patience = 1h;
    start();
    const std::shared_ptr<void> one = service->expect(), other = service->expect();
    const auto reply = submit();
    EXPECT_TRUE(ends(*reply));
}

}  // namespace
