#!/usr/bin/env python3
"""Times products over all GPUs of a host with PyTorch, with one process per GPU, for comparison
with product_bench.

usage: product_peers.py bf16:8192 f32:8192 ... [--rounds 9] [--json FILE]

Every GPU does the same work as in product_bench: it holds a part of both matrices, needs the whole
of one of them, and keeps a part of the result. PyTorch gathers the rows of a, and product_bench
gathers b. In the first variant one GPU does all the work.
  one           torch.mm on the first GPU, with the others idle
  gathered      NCCL's all-gather, then torch.mm
  overlapped    torch.ops.symm_mem.fused_all_gather_matmul, which multiplies parts as they arrive
A round begins on all GPUs at the same time and takes as long as the slowest GPU, measured with
events. Results are medians of rounds. f32 is computed in f32, not in TF32.
"""

import datetime
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

import rounds

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


def slowest_us(work, turns):
    """Returns the median over the rounds of the slowest process's time."""
    times = []
    for turn in range(turns + 2):
        us = torch.tensor([rounds.torch_us(work, before=dist.barrier)], device="cuda")
        dist.all_reduce(us, op=dist.ReduceOp.MAX)
        if turn >= 2:
            times.append(us.item())
    return statistics.median(times)


def measure(name, side, rank, world, turns):
    """Returns {variant: us} for a product of two side x side matrices."""
    dtype, part = TYPES[name], side // world
    generator = torch.Generator("cuda").manual_seed(rank)

    def random(rows, columns):
        return torch.rand(rows, columns, device="cuda", generator=generator).sub_(0.5).to(dtype)

    rows, columns = random(part, side), random(side, part)
    group = dist.group.WORLD.group_name
    gathered = torch.empty(side, side, dtype=dtype, device="cuda")
    out = torch.empty(side, part, dtype=dtype, device="cuda")

    def gather_then_multiply():
        dist.all_gather_into_tensor(gathered, rows)
        torch.mm(gathered, columns, out=out)

    def overlap():
        return torch.ops.symm_mem.fused_all_gather_matmul(rows, [columns], 0, group)

    us = {"gathered": slowest_us(gather_then_multiply, turns),
          "overlapped": slowest_us(overlap, turns)}
    expected = out.double()
    scale = expected.abs().max()
    worst = (overlap()[1][0].double() - expected).abs().max() / scale
    assert worst < {"bf16": 2e-2, "f16": 2e-3, "f32": 1e-4, "f64": 1e-10}[name], worst
    del expected, out
    right = random(side, side) if rank == 0 else None

    def alone():
        if rank == 0:
            torch.mm(gathered, right)

    return {"one": slowest_us(alone, turns), **us}


def run(rank, world, options, port):
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=world,
                            device_id=torch.device("cuda", rank))
    symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    rows = []
    for product in options.products:
        name, side = product.split(":")
        us = measure(name, int(side), rank, world, options.rounds)
        for way, figure in us.items() if rank == 0 else ():
            rows.append({"dtype": name, "side": int(side), "way": way,
                         "devices": 1 if way == "one" else world,
                         "us": figure, "times": us["one"] / figure})
            rate = 2 * int(side) ** 3 / figure / 1e6
            print(f"{name:4} {side:>6} {way:12} {figure:10.1f} us {rate:8.1f} TFLOP/s"
                  f" {us['one'] / figure:5.2f} x", flush=True)
    if rank == 0:
        about = {"gpus": world, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "date": datetime.date.today().isoformat()}
        rounds.write(options.json, {**about, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = rounds.parser(__doc__, rounds=9)
    parser.add_argument("products", nargs="+", metavar="TYPE:SIDE")
    parser.add_argument("--json")
    parsed = parser.parse_args()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit("product_peers.py: there is only one GPU, or none")
    # NVLink multicast is not used: data moves by copies only.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.multiprocessing.spawn(run, (gpus, parsed, 20000 + os.getpid() % 20000), nprocs=gpus)
