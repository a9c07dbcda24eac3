"""Why a row of the table is outside its bar: one sentence for each known miss. A row inside its bar has none here."""

from __future__ import annotations

_MEET = "of the stores of one warp that could meet in L1 on the way to L2, {} reach it alone; the model takes 1/3"
_SMS = "which SM takes which program is not known: {} find in L1 what an earlier program of their SM read"
_SPILLS = "spilled registers are not followed below L2: 41% of them reach DRAM"
_LEAST_RECENT = (
    "a third pass over 33 MiB that writes as much: the model gives up the line used longest ago, which is the one needed next; "
    "the GPU keeps 11 MB more of them"
)

REASONS: dict[tuple[str, str], str] = {
    ("copy, masked tail", "l2_write_sectors"): _MEET.format("64%"),
    ("rows of 781, padded to 1024", "l2_write_sectors"): _MEET.format("61%"),
    ("gpukit softmax 2048x1000 bf16, padded rows", "l2_write_sectors"): _MEET.format("69%"),
    ("embedding, rows of 300", "l2_write_sectors"): (
        "so short a program that its warps store in step without a barrier: 40% of the stores that could meet their "
        "neighbour's reach L2 alone; the model takes 2/3"
    ),
    ("gpukit bias_gelu 1000x1000 bf16", "l2_write_sectors"): (
        "its barrier is for the bias, and the warps wait for x after it: they are not in step. 62% of the stores that "
        "could meet their neighbour's reach L2 alone; the model takes 1/5"
    ),
    ("matmul 1024, 64x64x32, 1 stage", "l2_read_sectors"): _SMS.format("3% more of the loads"),
    ("16 MiB twice", "l2_read_sectors"): _SMS.format("5% of the second reads"),
    ("interleaved pairs", "l2_read_sectors"): (
        "L1 has lost 3.5% of the sectors before their second element is asked for; 1.1% in the model, in which "
        "the warps of a program load together"
    ),
    ("two passes, rows of 64 KiB", "l2_read_sectors"): (
        "how long L1 keeps a line is chance: the second pass missed 50%, 52% in another run, 54% in the model"
    ),
    ("gpukit softmax backward 264x65536 bf16, online", "l2_read_sectors"): (
        "the second pass is marked evict_first, which keeps more of the first one in L1; hints are not modelled"
    ),
    ("gpukit layer_norm 264x65536 bf16, online", "l2_read_sectors"): (
        "the two programs of an SM read the weights side by side in the model, and the second finds them in L1; on the GPU "
        "they drift apart"
    ),
    ("gpukit layer_norm 264x65536 bf16, online", "dram_read_bytes"): _LEAST_RECENT,
    ("gpukit layer_norm 264x65536 bf16, online", "dram_bytes"): _LEAST_RECENT,
    ("rows of 65536", "dram_write_bytes"): _SPILLS,
    ("rows of 65536", "dram_bytes"): _SPILLS,
    (
        "store stride 16",
        "dram_bytes",
    ): "sectors written in part are completed from DRAM as modelled, but written back later",
    ("transpose, 1x1024", "dram_bytes"): (
        "0.4 MB of sectors that 16 programs fill in turn are written back early; what is read agrees"
    ),
    ("gpukit adamw 2 M bf16, master weights, clipped", "dram_bytes"): (
        "4 MB of what its two launches and others had stored are written back; what is read agrees"
    ),
    ("48 MiB twice", "dram_bytes"): (
        "2.4 MB that others had left in L2 are written back; what is read agrees within 9%"
    ),
}
