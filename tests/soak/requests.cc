#include "tests/soak/requests.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "grpcpp/impl/codegen/client_unary_call.h"
#include "kernels/base/element.h"
#include "kernels/compute.h"

namespace tessera::soak {
namespace {

using google::protobuf::Message;

constexpr std::int64_t kElements = 1 << 16;
constexpr std::int64_t kLongest = 4096;  // of a vector
constexpr std::int64_t kLargest = 40;    // side of a matrix
constexpr int kReduceOps = 13;           // all: numbers from 1
static_assert(v1::ReduceOp_MAX == kReduceOps);

constexpr v1::Dtype kDtypes[] = {v1::DTYPE_F32,  v1::DTYPE_F64, v1::DTYPE_F16,
                                 v1::DTYPE_BF16, v1::DTYPE_I32, v1::DTYPE_I64,
                                 v1::DTYPE_U8,   v1::DTYPE_I8,  v1::DTYPE_BOOL};
constexpr std::size_t kWide = 6;  // of them, those that all operations take: the first

template <class T>
void Append(T value, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void AppendAs(v1::Dtype dtype, double value, std::string& bytes) {
  switch (dtype) {
    case v1::DTYPE_F64:
      return Append(value, bytes);
    case v1::DTYPE_F16:  // small integers, which it has exactly
      return Append(static_cast<std::uint16_t>(0x3c00 + (static_cast<int>(value * 100) & 0x3ff)),
                    bytes);
    case v1::DTYPE_BF16:
      return Append(static_cast<std::uint16_t>(0x3f80 + (static_cast<int>(value * 100) & 0x7f)),
                    bytes);
    case v1::DTYPE_I32:
      return Append(static_cast<std::int32_t>(value * 1000), bytes);
    case v1::DTYPE_I64:
      return Append(static_cast<std::int64_t>(value * 100000), bytes);
    case v1::DTYPE_U8:
      return Append(static_cast<std::uint8_t>(std::fabs(value) * 255), bytes);
    case v1::DTYPE_I8:
      return Append(static_cast<std::int8_t>(value * 127), bytes);
    case v1::DTYPE_BOOL:
      return Append(static_cast<std::uint8_t>(value > 0), bytes);
    default:
      return Append(static_cast<float>(value), bytes);
  }
}

bool IsByte(v1::Dtype dtype) {
  return dtype == v1::DTYPE_U8 || dtype == v1::DTYPE_I8 || dtype == v1::DTYPE_BOOL;
}

std::string NameOf(v1::Dtype dtype, int which) {
  return "soak/" + v1::Dtype_Name(dtype) + (which == 0 ? "/a" : "/b");
}

bool IsFloat(v1::Dtype dtype) {
  return dtype != v1::DTYPE_I32 && dtype != v1::DTYPE_I64 && !IsByte(dtype);
}

// Of a value against a sum of terms whose absolute values add up to `size`.
std::string CheckSum(const char* what, double value, long double sum, double size, double unit,
                     const v1::ExecutionStats& stats) {
  const auto expected = static_cast<double>(sum);
  const double bound = stats.roundoff() * size + unit * std::fabs(expected);
  if (std::fabs(value - expected) <= bound) return "";
  char text[200];
  std::snprintf(text, sizeof text, "%s by %s: %.17g instead of %.17g, bound %.3g", what,
                stats.strategy().c_str(), value, expected, bound);
  return text;
}

v1::BufferSpec SpecOf(v1::Dtype dtype, std::int64_t elements, std::int64_t ttl_seconds = 0) {
  v1::BufferSpec spec;
  spec.set_dtype(dtype);
  spec.add_shape(elements);
  spec.set_replace(true);
  if (ttl_seconds > 0) spec.mutable_ttl()->set_seconds(ttl_seconds);
  return spec;
}

// header: the first message, without data.
grpc::Status UploadWhole(const Peer& peer, const v1::UploadRequest& header,
                         const std::string& bytes, bool in_parts) {
  grpc::ClientContext context;
  peer.Identify(context);
  v1::UploadResponse response;
  auto writer = v1::BufferService::NewStub(peer.channel)->Upload(&context, &response);
  v1::UploadRequest request = header;
  const std::size_t first = in_parts ? bytes.size() / 3 / 8 * 8 : bytes.size();
  request.set_data(bytes.substr(0, first));
  writer->Write(request);
  if (first < bytes.size()) {
    v1::UploadRequest rest;
    rest.set_data(bytes.substr(first));
    writer->Write(rest);
  }
  writer->WritesDone();
  return writer->Finish();
}

}  // namespace

Arrays::Arrays(std::uint64_t seed) : random_(seed) {
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (const v1::Dtype dtype : kDtypes) {
    for (const int which : {0, 1}) {
      Array& array = arrays_.emplace_back();
      array.name = NameOf(dtype, which);
      array.dtype = dtype;
      for (std::int64_t i = 0; i < kElements; ++i) {
        const double value = uniform(random_);
        AppendAs(dtype, value, array.bytes);
        array.values.push_back(dtype == v1::DTYPE_F32 ? static_cast<float>(value) : value);
      }
    }
  }
}

grpc::Status Arrays::Upload(const Peer& peer) const {
  for (const Array& array : arrays_) {
    v1::UploadRequest header;
    header.set_name(array.name);
    *header.mutable_spec() = SpecOf(array.dtype, kElements);
    grpc::Status status = UploadWhole(peer, header, array.bytes, true);
    if (!status.ok()) return status;
  }
  return grpc::Status::OK;
}

void Arrays::Delete(const Peer& peer) const {
  const auto stub = v1::BufferService::NewStub(peer.channel);
  for (const Array& array : arrays_) {
    grpc::ClientContext context;
    peer.Identify(context);
    v1::DeleteBufferRequest request;
    request.set_name(array.name);
    v1::DeleteBufferResponse response;
    static_cast<void>(stub->DeleteBuffer(&context, request, &response));
  }
}

std::int64_t Arrays::Below(std::int64_t n) {
  return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
}

v1::Operand Arrays::Window(v1::Dtype dtype, int which, std::initializer_list<std::int64_t> shape) {
  v1::Operand operand;
  operand.set_buffer(NameOf(dtype, which));
  std::int64_t elements = 1;
  for (const std::int64_t extent : shape) {
    operand.mutable_view()->add_shape(extent);
    elements *= extent;
  }
  operand.mutable_view()->set_offset(Below(kElements - elements));
  return operand;
}

std::unique_ptr<Message> Arrays::Random(int number, std::string& method) {
  // In turn, so that none is left out. Map and Reduce alone take all types.
  const int operation = number % 8, round = number / 8;
  v1::Dtype dtype = kDtypes[round % (operation < 6 ? kWide : std::size(kDtypes))];
  const std::int64_t n = 1 + Below(kLongest);
  const std::int64_t m = 1 + Below(kLargest), k = 1 + Below(kLargest),
                     columns = 1 + Below(kLargest);
  switch (operation) {
    case 0: {
      method = "Dot";
      auto request = std::make_unique<v1::DotRequest>();
      *request->mutable_a() = Window(dtype, 0, {n});
      *request->mutable_b() = Window(dtype, 1, {n});
      return request;
    }
    case 1: {
      method = "WindowSum";
      auto request = std::make_unique<v1::WindowSumRequest>();
      *request->mutable_x() = Window(dtype, 0, {n});
      request->set_radius(Below(40));
      return request;
    }
    case 6: {
      method = "Reduce";
      auto request = std::make_unique<v1::ReduceRequest>();
      constexpr v1::ReduceOp kOfTruth[] = {v1::REDUCE_OP_SUM, v1::REDUCE_OP_MEAN, v1::REDUCE_OP_ALL,
                                           v1::REDUCE_OP_ANY};
      request->set_op(dtype == v1::DTYPE_BOOL ? kOfTruth[Below(std::size(kOfTruth))]
                                              : static_cast<v1::ReduceOp>(1 + round % kReduceOps));
      if (Below(2) == 0) {
        *request->mutable_x() = Window(dtype, 0, {n});
      } else {
        *request->mutable_x() = Window(dtype, 0, {m, columns});
        request->add_axes(static_cast<std::int32_t>(Below(2)));
      }
      return request;
    }
    case 2: {
      method = "Matmul";
      if (dtype == v1::DTYPE_I64) dtype = v1::DTYPE_F64;
      auto request = std::make_unique<v1::MatmulRequest>();
      *request->mutable_a() = Window(dtype, 0, {m, k});
      *request->mutable_b() = Window(dtype, 1, {k, columns});
      if (dtype == v1::DTYPE_I32) request->set_out_dtype(v1::DTYPE_I64);
      return request;
    }
    case 3: {
      method = "Add";
      auto request = std::make_unique<v1::AddRequest>();
      *request->mutable_a() = Window(dtype, 0, {m, columns});
      *request->mutable_b() = Window(dtype, 1, {m, columns});
      return request;
    }
    case 4: {
      method = "TopK";
      auto request = std::make_unique<v1::TopKRequest>();
      *request->mutable_x() = Window(dtype, 0, {m, columns});
      request->set_k(1 + Below(columns));
      request->set_axis(1);
      request->set_smallest(Below(2) == 0);
      return request;
    }
    case 7: {
      method = "Map";
      auto request = std::make_unique<v1::MapRequest>();
      *request->add_operands() = Window(dtype, 0, {m, columns});
      *request->add_operands() = Window(dtype, 1, {1, columns});
      v1::Expression& expression = *request->mutable_expression();
      expression.add_nodes()->set_operand(0);
      expression.add_nodes()->set_operand(1);
      constexpr v1::MapOp kNumbers[] = {v1::MAP_OP_ADD, v1::MAP_OP_MULTIPLY, v1::MAP_OP_MAXIMUM};
      constexpr v1::MapOp kTruth[] = {v1::MAP_OP_AND, v1::MAP_OP_OR, v1::MAP_OP_XOR};
      const auto& ops = dtype == v1::DTYPE_BOOL ? kTruth : kNumbers;
      for (std::uint32_t i = 2; i < 2 + 3; ++i) {
        v1::Expression::Node& node = *expression.add_nodes();
        node.set_op(ops[Below(std::size(ops))]);
        node.add_args(i - 1);
        node.add_args(static_cast<std::uint32_t>(Below(i)));
      }
      if (!IsFloat(dtype)) return request;
      v1::Expression::Node& last = *expression.add_nodes();
      last.set_op(v1::MAP_OP_TANH);
      last.add_args(4);
      return request;
    }
    default: {
      method = "Execute";
      auto request = std::make_unique<v1::ExecuteRequest>();
      v1::ReduceRequest& rows = *request->add_steps()->mutable_reduce();
      rows.set_op(v1::REDUCE_OP_SUM_SQUARES);
      *rows.mutable_x() = Window(v1::DTYPE_F32, 0, {m, k});
      rows.add_axes(1);
      rows.mutable_result()->set_scratch(true);
      v1::MatmulRequest& product = *request->add_steps()->mutable_matmul();
      *product.mutable_a() = rows.x();
      *product.mutable_b() = Window(v1::DTYPE_F32, 1, {k, columns});
      product.mutable_result()->set_scratch(true);
      v1::TopKRequest& best = *request->add_steps()->mutable_top_k();
      best.mutable_x()->set_step(1);
      best.set_k(1);
      best.set_axis(1);
      v1::DotRequest& dot = *request->add_steps()->mutable_dot();
      dot.mutable_a()->set_step(0);
      dot.mutable_b()->set_step(0);
      return request;
    }
  }
}

std::vector<Request> Arrays::MakeRequests(int count) {
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    Request& request = requests.emplace_back();
    request.message = Random(i, request.method);
  }
  return requests;
}

const Arrays::Array& Arrays::Find(const std::string& name) const {
  return *std::find_if(arrays_.begin(), arrays_.end(),
                       [&](const Array& array) { return array.name == name; });
}

std::string Arrays::Check(const Request& request, const Message& answer) const {
  const auto at = [this](const v1::Operand& operand, std::int64_t i) {
    return Find(operand.buffer()).values[static_cast<std::size_t>(operand.view().offset() + i)];
  };
  const auto has_reference = [this](const v1::Operand& operand) {
    const v1::Dtype dtype = Find(operand.buffer()).dtype;
    return dtype == v1::DTYPE_F32 || dtype == v1::DTYPE_F64;
  };
  long double sum = 0;
  double size = 0;
  const auto add = [&](double term) {
    sum += term;
    size += std::fabs(term);
  };
  if (request.method == "Dot") {
    const auto& dot = static_cast<const v1::DotRequest&>(*request.message);
    if (!has_reference(dot.a())) return "";
    for (std::int64_t i = 0; i < dot.a().view().shape(0); ++i) add(at(dot.a(), i) * at(dot.b(), i));
    const auto& response = static_cast<const v1::DotResponse&>(answer);
    return CheckSum("Dot", response.value().real(), sum, size, kRoundoffF64, response.stats());
  }
  if (request.method == "Reduce") {
    const auto& reduce = static_cast<const v1::ReduceRequest&>(*request.message);
    if (!has_reference(reduce.x()) || reduce.axes_size() > 0 || reduce.op() != v1::REDUCE_OP_SUM)
      return "";
    for (std::int64_t i = 0; i < reduce.x().view().shape(0); ++i) add(at(reduce.x(), i));
    const auto& response = static_cast<const v1::ReduceResponse&>(answer);
    return CheckSum("SUM", response.value().real(), sum, size, kRoundoffF64, response.stats());
  }
  if (request.method != "Matmul") return "";
  const auto& product = static_cast<const v1::MatmulRequest&>(*request.message);
  if (!has_reference(product.a())) return "";
  const auto& response = static_cast<const v1::MatmulResponse&>(answer);
  const bool f32 = response.tensor().dtype() == v1::DTYPE_F32;
  const std::int64_t m = product.a().view().shape(0), k = product.a().view().shape(1);
  const std::int64_t n = product.b().view().shape(1);
  const std::string& data = response.tensor().data();
  if (data.size() != static_cast<std::size_t>(m * n) * (f32 ? 4 : 8)) return "a product's size";
  for (std::int64_t i = 0; i < m * n; ++i) {
    sum = size = 0;
    for (std::int64_t l = 0; l < k; ++l)
      add(at(product.a(), i / n * k + l) * at(product.b(), l * n + i % n));
    float narrow = 0;
    double value = 0;
    if (f32) {
      std::memcpy(&narrow, data.data() + i * 4, 4);
      value = narrow;
    } else {
      std::memcpy(&value, data.data() + i * 8, 8);
    }
    std::string wrong =
        CheckSum("Matmul", value, sum, size, f32 ? kRoundoffF32 : kRoundoffF64, response.stats());
    if (!wrong.empty()) return wrong;
  }
  return "";
}

grpc::Status Call(const Peer& peer, const Request& request, std::unique_ptr<Message>& answer) {
  const auto* service = v1::DotRequest::descriptor()->file()->FindServiceByName("ComputeService");
  const google::protobuf::MethodDescriptor* method = service->FindMethodByName(request.method);
  answer.reset(google::protobuf::MessageFactory::generated_factory()
                   ->GetPrototype(method->output_type())
                   ->New());
  const std::string path = "/tessera.v1.ComputeService/" + request.method;
  const grpc::internal::RpcMethod rpc(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
  grpc::ClientContext context;
  peer.Identify(context);
  return grpc::internal::BlockingUnaryCall<google::protobuf::MessageLite,
                                           google::protobuf::MessageLite>(
      peer.channel.get(), rpc, &context, *request.message, answer.get());
}

std::string Bits(Message& answer) {
  for (const char* field : {"stats", "queue_us", "total_us"}) {
    if (const auto* found = answer.GetDescriptor()->FindFieldByName(field))
      answer.GetReflection()->ClearField(&answer, found);
  }
  return answer.SerializeAsString();
}

std::string Churn(const Peer& peer, int caller, std::mt19937_64& random) {
  const auto stub = v1::BufferService::NewStub(peer.channel);
  const auto compute = v1::ComputeService::NewStub(peer.channel);
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  // The same names in every tenant.
  const std::string name = "churn/" + std::to_string(caller) + "/" + std::to_string(below(4));
  const std::int64_t elements = 1 + below(8192);
  std::int64_t sum = 0;
  std::string bytes;
  for (std::int64_t i = 0; i < elements; ++i) {
    const auto value = static_cast<std::int32_t>(below(2001) - 1000);
    Append(value, bytes);
    sum += value;
  }
  const auto failed = [&](const char* what, const grpc::Status& status) {
    return std::string(what) + " " + name + ": " + std::to_string(status.error_code()) + " " +
           status.error_message();
  };
  // Some are never deleted.
  const bool expires = below(4) == 0;
  const v1::BufferSpec spec = SpecOf(v1::DTYPE_I32, elements, expires ? 30 : 0);
  const auto ask = [&](auto method, const auto& request, auto& response) {
    grpc::ClientContext context;
    peer.Identify(context);
    return (*stub.*method)(&context, request, &response);
  };
  using Stub = v1::BufferService::Stub;
  v1::UploadRequest header;
  header.set_name(name);
  grpc::Status status;
  const bool sealed_apart = below(2) == 0;
  if (sealed_apart) {
    v1::CreateBufferRequest request;
    request.set_name(name);
    *request.mutable_spec() = spec;
    v1::CreateBufferResponse response;
    status = ask(&Stub::CreateBuffer, request, response);
    if (!status.ok()) return failed("CreateBuffer", status);
    header.set_version(response.buffer().version());
  } else {
    *header.mutable_spec() = spec;
  }
  status = UploadWhole(peer, header, bytes, below(2) == 0);
  if (!status.ok()) return failed("Upload", status);
  if (sealed_apart) {
    v1::SealBufferRequest request;
    request.set_name(name);
    request.set_version(header.version());
    v1::SealBufferResponse response;
    status = ask(&Stub::SealBuffer, request, response);
    if (!status.ok()) return failed("SealBuffer", status);
  }
  const auto check_sum = [&](const std::string& of) -> std::string {
    grpc::ClientContext context;
    peer.Identify(context);
    v1::ReduceRequest request;
    request.mutable_x()->set_buffer(of);
    request.set_op(v1::REDUCE_OP_SUM);
    v1::ReduceResponse response;
    const grpc::Status summed = compute->Reduce(&context, request, &response);
    if (!summed.ok()) return failed("Reduce", summed);
    return response.value().integer() == sum ? "" : "the sum of " + of + " is another's";
  };
  if (std::string wrong = check_sum(name); !wrong.empty()) return wrong;
  const std::string copy = name + "/copy";
  {
    v1::CopyBufferRequest request;
    request.set_source(name);
    request.set_name(copy);
    request.set_dtype(v1::DTYPE_I64);
    request.set_replace(true);
    v1::CopyBufferResponse response;
    status = ask(&Stub::CopyBuffer, request, response);
    if (!status.ok()) return failed("CopyBuffer", status);
  }
  {
    v1::UpdateBufferRequest request;
    request.set_name(copy);
    request.mutable_ttl()->set_seconds(60);
    v1::UpdateBufferResponse response;
    status = ask(&Stub::UpdateBuffer, request, response);
    if (!status.ok()) return failed("UpdateBuffer", status);
    if (!response.buffer().has_expire_time()) return "UpdateBuffer " + copy + ": it never expires";
  }
  {
    v1::ListBuffersRequest request;
    request.set_prefix(name);
    v1::ListBuffersResponse response;
    status = ask(&Stub::ListBuffers, request, response);
    if (!status.ok()) return failed("ListBuffers", status);
    if (response.buffers_size() != 2 || response.buffers(1).name() != copy)
      return "ListBuffers " + name + ": " + response.ShortDebugString();
  }
  if (std::string wrong = check_sum(copy); !wrong.empty()) return wrong;
  {
    grpc::ClientContext context;
    peer.Identify(context);
    v1::DownloadRequest request;
    request.set_name(name);
    const auto reader = stub->Download(&context, request);
    std::string back;
    for (v1::DownloadResponse part; reader->Read(&part);) back += part.data();
    status = reader->Finish();
    if (!status.ok()) return failed("Download", status);
    if (back != bytes) return "Download " + name + ": other bytes";
  }
  for (const std::string& doomed : {copy, name}) {
    if (expires && doomed == name) continue;
    v1::DeleteBufferRequest request;
    request.set_name(doomed);
    v1::DeleteBufferResponse response;
    status = ask(&Stub::DeleteBuffer, request, response);
    if (!status.ok()) return failed("DeleteBuffer", status);
  }
  return "";
}

}  // namespace tessera::soak
