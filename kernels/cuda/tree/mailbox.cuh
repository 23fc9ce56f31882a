// The blocks of one launch send their values to the last block that starts.
//
// A block stores the value of a chunk in the chunk's slot of the stream's mailbox. The last block
// to *start* receives all slots in index order. (To find out which block is the last, each block
// takes a ticket before it does anything else; the loads of its operands overlap with that.) Every
// block that the receiver waits for has already started and waits for no other block, so the wait
// ends on any device, no matter how many blocks fit on it. A word in a slot is stored together with
// its flag in one 64-bit store, so value and flag arrive together and neither side needs a fence
// (the LL protocol of NVIDIA's NCCL). The usual scheme is to store, fence and count, and the last
// block to count loads the values. Compared with that, the mailbox saves two trips to the L2 cache,
// about a microsecond.
//
// Invariant: between two folds on a stream, all slots are zero and no ticket is taken. The receiver
// zeroes the slots that it has received.
//
//   block 0 ---- chunk 0 ----> slot 0 --.
//   block 1 ---- chunk 1 ----> slot 1 ---+--> the last block to start: fold, finish, zero
//   block 2 ---- chunk 2 ----> slot 2 --'
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/fixed_tree.h"

namespace tessera {

// Returns the number of blocks of the launch that have taken a ticket before this one. The assembly
// is volatile, like the loads of operands, so that the request is issued before these loads and
// overlaps with them. It also brings the mailbox's page into the SM's translation buffer (TLB). A
// block that first touches this page when it sends or receives would wait about a microsecond for
// the translation.
__device__ inline unsigned TakeTicket(const Mailbox& mailbox) {
  unsigned ticket;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(mailbox.ticket)
               : "memory");
  return ticket;
}

// A value is sent in 64-bit words, each with 32 bits of the value and a 32-bit flag. One 16-byte
// access moves two words, and each half of the access is atomic.
template <class W>
inline constexpr int kMailPairs = (sizeof(W) + 7) / 8;

__host__ __device__ inline ulonglong2* MailSlot(const Mailbox& mailbox, std::int64_t chunk,
                                                int pairs) {
  return mailbox.slots + chunk * pairs;
}

inline constexpr unsigned long long kMailFlag = 1ull << 32;

template <class W>
__device__ void Send(const Mailbox& mailbox, std::int64_t chunk, const W& value) {
  constexpr int kPairs = kMailPairs<W>;
  unsigned words[2 * kPairs] = {};
  std::memcpy(words, &value, sizeof value);
  ulonglong2* slot = MailSlot(mailbox, chunk, kPairs);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(slot + i),
                 "l"(words[2 * i] | kMailFlag), "l"(words[2 * i + 1] | kMailFlag)
                 : "memory");
}

__device__ inline ulonglong2 Peek(const ulonglong2* pair) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(pair)
               : "memory");
  return v;
}

// Waits for the values of chunks first, first + kTreeLanes, ..., folds them in order and zeroes
// their slots. Loads kAtOnce values at a time.
template <class C, int kAtOnce>
__device__ typename C::Wide Receive(const Mailbox& mailbox, std::int64_t first,
                                    std::int64_t chunks) {
  using Wide = typename C::Wide;
  constexpr int kPairs = kMailPairs<Wide>;
  Wide total = C::Identity();
#pragma unroll 1
  for (; first < chunks; first += kAtOnce * kTreeLanes) {
    ulonglong2 words[kAtOnce][kPairs];
    bool here;
    do {
      unsigned long long flags = kMailFlag;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kTreeLanes < chunks) {
          const ulonglong2* slot = MailSlot(mailbox, first + j * kTreeLanes, kPairs);
#pragma unroll
          for (int i = 0; i < kPairs; ++i) words[j][i] = Peek(slot + i);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kTreeLanes < chunks) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) flags &= words[j][i].x & words[j][i].y;
        }
      }
      here = flags != 0;
    } while (!here);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * kTreeLanes < chunks) {
        unsigned plain[2 * kPairs];
        ulonglong2* slot = MailSlot(mailbox, first + j * kTreeLanes, kPairs);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          plain[2 * i] = static_cast<unsigned>(words[j][i].x);
          plain[2 * i + 1] = static_cast<unsigned>(words[j][i].y);
          slot[i] = make_ulonglong2(0, 0);
        }
        Wide value;
        std::memcpy(&value, plain, sizeof value);
        total = C::Combine(total, value);
      }
    }
  }
  return total;
}

}  // namespace tessera
