// Unread responses. The calls go to a server that does not exist, and end when they are cancelled.
#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <memory>

#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/rpc/answers.h"
#include "tessera/v1/buffer.grpc.pb.h"

namespace tessera {
namespace {

class AnswersTest : public ::testing::Test {
 protected:
  struct Call {
    Answers::Entry entry;
    grpc::ClientContext context;
    v1::ListBuffersResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::ListBuffersResponse>> reader;
  };

  ~AnswersTest() override {
    for (Call& call : calls_) call.context.TryCancel();
    queue_.Shutdown();
    while (Ended() != nullptr) continue;
  }

  // Adds a call whose response has been ready since that second.
  Call& Add(int second) {
    Call& call = calls_.emplace_back();
    call.context.set_wait_for_ready(true);
    call.reader = stub_->AsyncListBuffers(&call.context, {}, &queue_);
    call.reader->Finish(&call.response, &call.status, &call);
    answers_.Add(call.entry, call.context.c_call(), Second(second));
    return call;
  }
  // Cancels the calls whose responses have been unread for more than a second.
  void CancelUnread(int second) { answers_.CancelUnread(Second(second), absl::Seconds(1)); }
  void Remove(Call& call) { answers_.Remove(call.entry); }

  // Returns the next call that has ended, or null.
  const Call* Ended() {
    void* call = nullptr;
    bool ok = false;
    const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(10);
    const auto next = queue_.AsyncNext(&call, &ok, limit);
    return next == grpc::CompletionQueue::GOT_EVENT ? static_cast<const Call*>(call) : nullptr;
  }

 private:
  static absl::Time Second(int second) { return absl::UnixEpoch() + absl::Seconds(second); }

  Answers answers_;
  std::deque<Call> calls_;
  grpc::CompletionQueue queue_;
  // No server listens on port 1.
  const std::unique_ptr<v1::BufferService::Stub> stub_ = v1::BufferService::NewStub(
      grpc::CreateChannel("127.0.0.1:1", grpc::InsecureChannelCredentials()));
};

TEST_F(AnswersTest, OldOnesAreCancelledInTheOrderOfTheirTimes) {
  Call &first = Add(0), &second = Add(1), &third = Add(2);
  CancelUnread(1);
  CancelUnread(2);
  EXPECT_EQ(Ended(), &first);
  EXPECT_EQ(first.status.error_code(), grpc::StatusCode::CANCELLED);
  CancelUnread(3);
  EXPECT_EQ(Ended(), &second);
  Remove(second);
  Remove(first);
  CancelUnread(4);
  EXPECT_EQ(Ended(), &third);
  Remove(third);
}

TEST_F(AnswersTest, CancelledCallsEndInAnyOrderBesideNewOnes) {
  Call &first = Add(0), &second = Add(0);
  CancelUnread(2);
  for (int i = 0; i < 2; ++i) EXPECT_NE(Ended(), nullptr);
  Remove(second);
  Call& third = Add(2);
  Remove(first);
  CancelUnread(4);
  EXPECT_EQ(Ended(), &third);
  Remove(third);
}

}  // namespace
}  // namespace tessera
