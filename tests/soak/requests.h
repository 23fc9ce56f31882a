// What a soak asks a server, and what is right.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "tessera/v1/buffer.grpc.pb.h"
#include "tessera/v1/compute.grpc.pb.h"

namespace tessera::soak {

// A connection, as a tenant.
struct Peer {
  std::shared_ptr<grpc::Channel> channel;
  std::string token;  // empty: without

  void Identify(grpc::ClientContext& context) const {
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  }
};

// A request of an operation, any of them on arrays of any type, and the answer that it had alone:
// from then on every answer has to have the same bits.
struct Request {
  std::string method;  // "Dot"
  std::unique_ptr<google::protobuf::Message> message;
  std::string answer;  // what is left of it without statistics; serialized
};

// Arrays that are there for the whole soak, two of each element type.
class Arrays {
 public:
  explicit Arrays(std::uint64_t seed);
  grpc::Status Upload(const Peer& peer) const;
  void Delete(const Peer& peer) const;

  // So many random requests; the same for the same seed.
  std::vector<Request> MakeRequests(int count);
  // Empty, or what is wrong with the answer of a Dot, a sum or a product of f32 or f64, by a
  // reference in long double and the bound that the answer states. All others: empty.
  std::string Check(const Request& request, const google::protobuf::Message& answer) const;

 private:
  struct Array {
    std::string name;
    v1::Dtype dtype;
    std::string bytes;
    std::vector<double> values;
  };
  std::int64_t Below(std::int64_t n);
  v1::Operand Window(v1::Dtype dtype, int which, std::initializer_list<std::int64_t> shape);
  std::unique_ptr<google::protobuf::Message> Random(int number, std::string& method);
  const Array& Find(const std::string& name) const;

  std::mt19937_64 random_;
  std::vector<Array> arrays_;
};

// Calls an operation. The answer is left without statistics.
grpc::Status Call(const Peer& peer, const Request& request,
                  std::unique_ptr<google::protobuf::Message>& answer);
std::string Bits(google::protobuf::Message& answer);

// One life of a buffer of the caller's own: created by its upload or before it, whole or in parts,
// summed, replaced, copied, listed, given another ttl, read back, and deleted or left to expire. Empty, or what went wrong.
std::string Churn(const Peer& peer, int caller, std::mt19937_64& random);

}  // namespace tessera::soak
