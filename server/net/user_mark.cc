#include "server/net/user_mark.h"

#include "absl/strings/str_cat.h"
#include "grpc/grpc.h"

namespace tessera {
namespace {

// Credentials without TLS that pass each call to UserMark::Process. gRPC's C++ interface supports
// such a processor only with TLS.
class MarkedCredentials final : public grpc::ServerCredentials {
 public:
  explicit MarkedCredentials(UserMark& mark) { mark.AddTo(credentials_); }
  ~MarkedCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_ = grpc_insecure_server_credentials_create();
};

}  // namespace

void UserMark::AddTo(grpc_server_credentials* credentials) {
  grpc_server_credentials_set_auth_metadata_processor(
      credentials, {.process = &UserMark::Process, .destroy = nullptr, .state = this});
}

void UserMark::Process(void* mark, grpc_auth_context* context, const grpc_metadata*, std::size_t,
                       grpc_process_auth_metadata_done_cb done, void* call) {
  UserMark& self = *static_cast<UserMark*>(mark);
  if (const std::optional<uid_t> user = self.user(); user.has_value()) {
    // The context belongs to the connection. The first call writes to it, before any handler sees
    // it.
    const std::lock_guard lock(self.mutex_);
    grpc_auth_property_iterator found =
        grpc_auth_context_find_properties_by_name(context, kProperty);
    if (grpc_auth_property_iterator_next(&found) == nullptr)
      grpc_auth_context_add_cstring_property(context, kProperty, absl::StrCat(*user).c_str());
  }
  done(call, nullptr, 0, nullptr, 0, GRPC_STATUS_OK, nullptr);
}

std::shared_ptr<grpc::ServerCredentials> MakeMarkedCredentials(UserMark& mark) {
  return std::make_shared<MarkedCredentials>(mark);
}

}  // namespace tessera
