"""Why a row of the table is outside its bar: one sentence for each known miss. A row inside its bar has none here."""

from __future__ import annotations

_MEET = "of the stores that could meet another one on the way to L2, {} reach it alone; the model takes 1/3 for all"
_SMS = "which SM takes which program is not known: {} find in L1 what an earlier program of their SM read"

REASONS: dict[tuple[str, str], str] = {
    ("copy, masked tail", "l2_write_sectors"): _MEET.format("67 %"),
    ("copy, both shifted by 1", "l2_write_sectors"): _MEET.format("57 %"),
    ("rows of 781, padded to 1024", "l2_write_sectors"): _MEET.format("61 %"),
    ("persistent softmax, rows of 781", "l2_write_sectors"): _MEET.format("18 %"),
    ("tiles of 64x64, ragged", "l2_write_sectors"): _MEET.format("73 %"),
    ("matmul 500, ragged", "l2_write_sectors"): _MEET.format("none"),
    ("matmul 1000, ragged", "l2_write_sectors"): "part of the spilled registers is read back before it leaves L1",
    ("matmul 1024, 64x64x32, 1 stage", "l2_read_sectors"): _SMS.format("3 % more of the loads"),
    ("16 MiB twice", "l2_read_sectors"): _SMS.format("5 % of the second reads"),
    ("rows of 65536", "dram_write_bytes"): "spilled registers are not followed below L2: 41 % of them reach DRAM",
    ("rows of 65536", "dram_bytes"): "spilled registers are not followed below L2: 41 % of them reach DRAM",
    (
        "store stride 16",
        "dram_bytes",
    ): "sectors written in part are completed from DRAM as modelled, but written back later",
    ("transpose, 1x1024", "dram_bytes"): (
        "0.2 MB of sectors that 16 programs fill in turn are written back early; what is read agrees"
    ),
    (
        "48 MiB twice",
        "dram_bytes",
    ): "2.4 MB that others had left in L2 are written back; what is read agrees within 8 %",
}
