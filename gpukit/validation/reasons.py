"""Why a row of a table of traffic is outside its bar: one sentence for each known miss. A row inside its bar has none here.

REASONS[kernel, counter] was found in the row of an H100, REASONS[kernel, counter, gpu] in that of another GPU, which comes first
there."""

from __future__ import annotations

_MEET = "of the stores of one warp that could meet in L1 on the way to L2, {} reach it alone; the model takes 1/3"
_SMS = "which SM takes which program is not known: {} find in L1 what an earlier program of their SM read"
_SPILLS = "spilled registers are not followed below L2: 41% of them reach DRAM"
_LEAST_RECENT = (
    "a third pass over 33 MiB that writes as much: the model gives up the line used longest ago, which is the one needed next; "
    "the GPU keeps 11 MB more of them"
)

_RAGGED = (
    "{} of the stores that could meet their neighbor's reach L2 alone, where the model takes 1/5; and the two rows looked at "
    "begin with a sector, so that fewer could meet than in most rows"
)
_ONCE = (
    "each of the {} MB that the kernel is given is read, which is what was measured; the sample of a few programs finds {} "
    "MB, and takes the rest to be in L2 already"
)
_AS_NEW = (
    "a sample takes what later programs read to be as new to L2 as what the first ones did: {} MB of a tensor of {}"
)
_EXPERTS = (
    "the rows and the weights have 167.8 MB, each read at least once, and the sample of the first programs finds 143.7; the "
    "other 22.9 MB were read twice"
)
_KEEPS = "of the 67 MB that a launch stores L2 keeps {} when it ends, and {} in the model"
_LENGTHS = "blocks of keys in a program: {} in those that were looked at, and {} in all, which give the number that was measured"
_NEAR_THE_SIZE = (
    "what it reads again is as large as what L2 holds between two uses: at the model's 72% of L2 nothing is read twice, at 50% "
    "{} MB are; the GPU read {} MB twice"
)
# Of the fourth set: what the programs that were looked at have, and all of them have not.
_OTHERS = "with 101 programs looked at in place of two the ratio is {}"
_LAST_OF_FOUR = (
    "the last of four programs has 64 of its 1,024 numbers, and neither of the two looked at is such a one. What is traced, times "
    "3,136 / 4,096, is {} of what was measured"
)
_LOST = (
    "L1 has lost {} of the sectors before they are asked for again; {} in the model, in which the warps of a program load "
    "together"
)
_GATHERS = "a sample takes what each program gathers to be in a place where no other has been: {}"
_SEARCHED = _GATHERS.format("523 MB are then read, and 456 were measured")
_LISTS = _GATHERS.format("3.8 MB are then read. Where all programs are simulated it is 3.4, which is what was measured")
_ALL = "{} MB are read where all programs are simulated, which is {} of what was measured; {}"
_THEIR_WORDS = _ALL.format(
    "141.7",
    "99.7%",
    "the rows of the result that the first programs add to stand for 100 MB, and the 18,206 words that are drawn have 74.6",
)
_SHORTER = _ALL.format(
    "93.3", "99%", "a sample takes each wave to read as much of b as the second one, and later ones have shorter sums"
)
_BLOCKS = _ALL.format(
    "498.3",
    "98.9%",
    "the blocks that the two programs looked at name stand for those of all, so that columns share more than they do",
)
_NEIGHBORS = _GATHERS.format("373 MB are read. Where all programs are simulated it is 111, and 184 were measured")
_WARPED = _GATHERS.format(
    "94% of what L1 lacks is then read from DRAM. Planes and places have 142.6 MB, and 166.5 were measured"
)
_PARTS = (
    "718 of the 824 MB that are read are the rests of sectors that the sampled programs fill in part. On the GPU those beside "
    "them fill these, and each of the 103.3 MB that the kernel is given is read once, which is what was measured"
)
_NEAR_THE_SIZE_TOO = (
    "what it uses again is as large as what L2 holds between two uses: at the model's 72% of L2 {} MB are {}, at {} {}; the GPU "
    "{}"
)
_STEPS = _NEAR_THE_SIZE_TOO.format("475", "read", "85%", "186", "read 298")
_KEEPS_GRADIENTS = _NEAR_THE_SIZE_TOO.format("0.1", "written", "60%", "6.4", "wrote 6.6, and read what the model says")
_ONE_PLACE = (
    "where addresses are no tile, all programs of a sample store to the same 4 KB, which is so in eight of the nine launches. "
    "Each of them writing the 48.2 MB of the ninth, it is 434 MB"
)
_MEDIANS = (
    "each of the 192.0 MB that the kernel is given is read once, which is what was measured. The sample takes 19.6 MB more to "
    "be new, which programs share, and 12.2 MB to complete sectors that two of them fill"
)

# Kernels of the fourth set with several rows.
_DEPTHWISE = "depthwise 3 x 3, every second pixel, 64 images of 96 planes of 112 x 112 fp16"
_WINDOWS = "windows of 3 x 3 laid out, 32 images of 128 planes of 56 x 56 fp16"
_MERGED = "rows of 512 int32, up and down again, put in order in 9 launches"
_PRODUCTS = "2048 products of 197 x 64 and 64 x 197 bf16, both transposed"
_SPARSE = "8192 rows by weights of 4096 x 4096 fp16, 16 of 64 blocks in a column are there"

_COLD = (
    "each SM reads {} once, {} M sectors in all, and finds them in L1 from then on. The sample has {} programs of an SM, and takes what "
    "these lack in an empty L1 to be what all lack: {} M sectors"
)

# Of the two halves.

# Of the fifth set.
_ALONE = "{} of the stores that could meet their neighbor's reach L2 alone, where the model takes {}{}"
_REDUCED = (
    "nobody asks for what its relaxed atomics found, so the compiler makes them reductions, which L2 does not answer; the model "
    "counted {} answers of a sector. It was fixed afterwards, and the ratio is {}"
)
_TF32 = (
    "not known. 65.5 MB are given and 206.7 are read, whatever part of L2 the model takes, from 40% to 72%: rows of a wave are read "
    "once by each. The GPU read 91 MB more"
)
_GATED = (
    "what it reads again is as large as what L2 holds between two uses: at the model's 72% of L2 the 37.7 MB that it is given are read "
    "once, at 60% 409.5 MB are; the GPU read 270.1"
)
_SUM_OF_PRODUCTS = (
    "it is given 26.2 MB, which the model reads once at 50% to 72% of L2, and 65.1 MB at 40%; the GPU read 8.8 MB of it twice. The "
    "rest of what lacks are 9.7 MB that it writes while it runs"
)
_HALF_FILLED = (
    "the model reads the rest of each sector of the tables (12.6 MB) before their letters fill it, where the GPU reads 6.2 MB: half of "
    "them were filled in time. What both read besides are the strings, of 2.1 MB"
)
_PROBED = (
    "not known in part: keys and table have 100.7 MB, and what is read beyond them are places of the table that L2 has lost: 222 MB on "
    "the GPU, 361 in the model, whose sample spreads probes over tables of its own"
)

# Kernels of the fifth set with several rows.
_CHECKERS = "4 red and black steps on 5001 x 4999 fp32, 9 launches"
_FOURIER = "Fourier transform of 4 Mi complex fp32 by fours, 11 launches"
_HALF_WIDE = (
    "of eight programs side by side the last has 128 of its 256 columns, and neither of the two looked at is such a one. What is "
    "traced, times 1920 / 2048, is 100% of what was measured"
)
_VIDEO = "48 frames of 1080 x 1920, NV12 to planes of fp16"
_KEYS = "4 Mi keys in a table of 8 Mi int64, 6 probes"
_ODD = "causal attention, 20 heads of 80, 3001 tokens bf16, 32x128"
_EDITS = "edit distances of 4096 pairs of 255 letters"
_FLOATS = "matmul 4096 x 4096 x 1999 tf32, 128x64"
_FP8 = "gated product 4096 x 7168 x 2048 fp8, two in a loop"
_EINSUM = "bmc,cbn->mn of 50, 4096, 32 and 4096 bf16, 128x128"

REASONS: dict[tuple[str, ...], str] = {
    # ---- the fifth set
    (_CHECKERS, "l2_write_sectors"): (
        "in the launch that copies, of the stores of one warp that could meet on the way to L2, 15% reach it alone, where the model "
        "takes 1/3: 1.77 of the 2.16 million sectors"
    ),
    (_CHECKERS, "dram_write_bytes"): (
        "of the 100 MB that each of its nine launches stores L2 keeps 21 when it ends (900 - 711 MB in all), and 36 in the model"
    ),
    ("a wave of 360 x 360 x 360 fp32, columns of 12 planes", "l2_write_sectors"): (
        "of three programs side by side the last has 104 of its 128 numbers, and neither of the two looked at is such a one. What is "
        "traced, times 360 / 384, is 100% of what was measured"
    ),
    (_VIDEO, "l2_read_sectors"): _HALF_WIDE,
    (_VIDEO, "l2_write_sectors"): _HALF_WIDE,
    (_FOURIER, "l2_write_sectors"): (
        "in the last nine launches two stores, on lines of their own, fill each sector: 77 to 84% of them met on the way to L2, and "
        "none in the model. That is 7.7 of the 8.2 million sectors"
    ),
    (_FOURIER, "dram_write_bytes"): (
        "of the 33.6 MB that a launch stores L2 keeps 19.5 in the mean when it ends, and 21.5 in the model"
    ),
    ("23 x 31 x 97 x 29 x 35 fp16, second and fourth dimension swapped", "l2_write_sectors"): _MEET.format("17%"),
    ("means of 37 times 10,000,019 bf16", "l2_write_sectors"): _MEET.format("5%"),
    ("1000 samples of 16,896 stereo tracks filtered fp32", "l2_write_sectors"): (
        "two stores, on lines of their own, fill each sector: all of them met on the way to L2, and none in the model"
    ),
    ("largest of 100,003 segments of 16,300,489 int32, in order", "l2_read_sectors"): _REDUCED.format("15.7 M", "1.00"),
    ("2 Mi springs between 256 Ki points of three fp32", "l2_read_sectors"): _REDUCED.format("9.4 M", "0.99"),
    (_KEYS, "l2_read_sectors"): (
        "not known in part: six neighbors of 8 bytes reach over 2.25 sectors in the mean, 10.5 M with the keys; L1 has lost 13% more "
        "of them before the last is asked for, and 2% in the model"
    ),
    (_KEYS, "dram_read_bytes"): _PROBED,
    (_KEYS, "dram_bytes"): _PROBED,
    ("bias, SiLU and a mask of bytes, 16384 rows of 4093 fp16, 264 programs", "l2_write_sectors"): _ALONE.format(
        "54%", "1/5", ""
    ),
    ("softmax of what is above a bound, 2048 rows of 128,257 fp16", "l2_write_sectors"): _ALONE.format(
        "84%", "2/3", "; and a row looked at begins with a sector. With 65 rows looked at the ratio is 0.94"
    ),
    ("weight norm of 12288 rows of 12,289 bf16, 16 warps", "l2_write_sectors"): _ALONE.format(
        "53%", "1/5", "; and a row looked at begins with a sector. With 65 rows looked at the ratio is 0.88"
    ),
    ("sums that begin anew, 32 Ki rows of 1009 fp32", "l2_write_sectors"): _ALONE.format("52%", "1/5", ""),
    (_FLOATS, "dram_read_bytes"): _TF32,
    (_FLOATS, "dram_bytes"): _TF32,
    (_FP8, "dram_read_bytes"): _GATED,
    (_FP8, "dram_bytes"): _GATED,
    (_EINSUM, "dram_read_bytes"): _SUM_OF_PRODUCTS,
    (_EINSUM, "dram_bytes"): _SUM_OF_PRODUCTS,
    (_ODD, "l2_read_sectors"): (
        "not known in part: the sample of eight programs asks for 18% more sectors than all do, whose loops have 12.3 blocks of keys "
        "in the mean"
    ),
    (_ODD, "dram_read_bytes"): _ONCE.format("28.8", "20.7"),
    (_ODD, "dram_bytes"): _ONCE.format("28.8", "20.7"),
    ("windows of 200 to both sides, 24 heads of 64, 10,000 tokens fp16, 64x32, 2 warps", "l2_read_sectors"): (
        "one of the two programs looked at is at the beginning, where the loop has 9 blocks of keys; all have 15.8 in the mean"
    ),
    ("softmax of 192 triangles of 1024 x 1024 fp16", "l2_read_sectors"): (
        "the two programs looked at are not in the middle of a triangle; with 65 programs looked at the ratio is 1.00"
    ),
    (_EDITS, "l2_read_sectors"): (
        "not known. L1 lacks 2.3% of what the loads ask for (5.6 of 237.9 M sectors), and 0.2% in the model, in which what a "
        "program has stored stays in L1"
    ),
    (_EDITS, "l2_write_sectors"): (
        "41% less of the 68.7 M sectors that the stores ask for reach L2, and 33% less in the model, which takes 1/3 of those that "
        "could meet to reach it alone"
    ),
    (_EDITS, "dram_read_bytes"): _HALF_FILLED,
    (_EDITS, "dram_bytes"): _HALF_FILLED,
    ("common letters of 512 Ki pairs of 64 and 200, by bits int64", "l2_read_sectors"): (
        "letters and masks have 3.80 M sectors. L1 has lost 0.33 M of the masks before they are asked for again, and 0.10 M in the "
        "model, in which the warps of a program load together"
    ),
    ("CTC losses of 1024 sequences, 400 steps of 80 classes, 63 labels fp32", "dram_bytes"): _ONCE.format(
        "131.1", "118.2"
    ),
    ("copy, masked tail", "l2_write_sectors"): _MEET.format("64%"),
    ("rows of 781, padded to 1024", "l2_write_sectors"): _MEET.format("61%"),
    ("gpukit softmax 2048x1000 bf16, padded rows", "l2_write_sectors"): _MEET.format("69%"),
    ("embedding, rows of 300", "l2_write_sectors"): (
        "so short a program that its warps store in step without a barrier: 40% of the stores that could meet their "
        "neighbor's reach L2 alone; the model takes 2/3"
    ),
    ("gpukit bias_gelu 1000x1000 bf16", "l2_write_sectors"): (
        "its barrier is for the bias, and the warps wait for x after it: they are not in step. 62% of the stores that "
        "could meet their neighbor's reach L2 alone; the model takes 1/5"
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
    ("48 MiB twice", "dram_bytes"): (
        "2.4 MB that others had left in L2 are written back; what is read agrees within 9%"
    ),
    # ---- the fourth set
    ("gradients of keys and values, 32 heads of 64, 2048 tokens bf16", "dram_bytes"): _KEEPS_GRADIENTS,
    ("medians of 3 x 3 pixels of 6000 x 8001 fp32", "l2_read_sectors"): (
        "both programs looked at have the first 256 pixels of a row, and the last of 32 has 65; "
        + _OTHERS.format("1.02")
    ),
    ("medians of 3 x 3 pixels of 6000 x 8001 fp32", "dram_read_bytes"): _MEDIANS,
    ("medians of 3 x 3 pixels of 6000 x 8001 fp32", "dram_bytes"): _MEDIANS,
    ("32 planes of 1024 x 1024 fp32 warped, up to 8 pixels away", "dram_read_bytes"): _WARPED,
    ("32 planes of 1024 x 1024 fp32 warped, up to 8 pixels away", "dram_bytes"): _WARPED,
    ("depthwise 7 x 7, 32 images of 56 x 56 x 128 fp16, channels last", "l2_read_sectors"): (
        "one of the two programs looked at is in the corner of an image: their masks leave out 24% of the pixels, those of all "
        "programs 6%; " + _OTHERS.format("1.02")
    ),
    ("depthwise 7 x 7, 32 images of 56 x 56 x 128 fp16, channels last", "dram_read_bytes"): _AS_NEW.format(
        "30.7", "25.7"
    ),
    (_DEPTHWISE, "l2_read_sectors"): _LAST_OF_FOUR.format("98%"),
    (_DEPTHWISE, "l2_write_sectors"): _LAST_OF_FOUR.format("100%"),
    (_DEPTHWISE, "dram_read_bytes"): _LAST_OF_FOUR.format("101%"),
    (_DEPTHWISE, "dram_bytes"): _LAST_OF_FOUR.format("100%"),
    (_WINDOWS, "l2_read_sectors"): _LAST_OF_FOUR.format("99%"),
    (_WINDOWS, "l2_write_sectors"): _LAST_OF_FOUR.format("100%"),
    ("patches of 14 x 14 of 512 images of 3 x 224 x 224 fp16", "l2_read_sectors"): (
        "one of the two programs looked at has a leftmost patch, whose rows of 28 bytes begin with a sector; those of 12 in 16 "
        "patches reach over two; " + _OTHERS.format("0.99")
    ),
    ("patches of 14 x 14 of 512 images of 3 x 224 x 224 fp16", "l2_write_sectors"): (
        "the rows that the two programs looked at store reach over fewer sectors than most do; "
        + _OTHERS.format("0.98")
    ),
    ("x[::2, 5::3] of 32768 x 8191 fp16", "l2_read_sectors"): (
        "the two programs looked at have 852 numbers in the mean, and all programs 910, which gives what was measured"
    ),
    ("x[::2, 5::3] of 32768 x 8191 fp16", "l2_write_sectors"): (
        "the two programs looked at have 852 numbers in the mean, and all programs 910; and one of them stores a row that "
        "begins with a sector, as few do; " + _OTHERS.format("0.97")
    ),
    (_MERGED, "l2_write_sectors"): (
        "in the last three launches two stores, on lines of their own, fill each sector: 29, 29 and 80% of them met on the way "
        "to L2, and none in the model"
    ),
    (_MERGED, "dram_write_bytes"): _ONE_PLACE,
    (_MERGED, "dram_bytes"): _ONE_PLACE,
    ("matmul 3072 x 3328 x 4096 fp16, steps dealt out to 132 programs", "dram_read_bytes"): _STEPS,
    ("matmul 3072 x 3328 x 4096 fp16, steps dealt out to 132 programs", "dram_bytes"): _STEPS,
    (_PRODUCTS, "l2_write_sectors"): (
        "the two programs looked at store 54% of their tiles, and all programs 59%; and 45% of the stores that could meet their "
        "neighbor's reach L2 alone, where the model takes 1/5"
    ),
    (_PRODUCTS, "dram_read_bytes"): _PARTS,
    (_PRODUCTS, "dram_write_bytes"): (
        "sectors that the sampled programs fill in part are written when their rests are read, and then again. On the GPU those "
        "beside them fill these, and of the 159.0 MB that the kernel stores 142.3 are written once and the others left in L2"
    ),
    (_PRODUCTS, "dram_bytes"): _PARTS,
    ("lower triangle of 4096 x 4096 by 4096 x 4096 fp16", "dram_read_bytes"): _SHORTER,
    ("lower triangle of 4096 x 4096 by 4096 x 4096 fp16", "dram_bytes"): _SHORTER,
    ("instance norm of 4096 planes of 100 x 100 fp32, three passes", "l2_read_sectors"): (
        "the 16 programs of an SM have 640 kB in use, and an L1 of 224 KiB: 9% of what the second and the third pass ask for was "
        "there all the same, and nothing in the model, in which these programs go on side by side"
    ),
    ("focal losses of 64 Mi bf16, summed in blocks of 2048", "l2_read_sectors"): _LOST.format("15%", "none"),
    ("gradients of 3 taps of 4096 channels, 32768 tokens fp16", "l2_read_sectors"): _LOST.format("12%", "1%"),
    ("gradients of 50,257 embeddings of 1024, 32 Ki tokens add fp32", "dram_read_bytes"): _THEIR_WORDS,
    ("gradients of 50,257 embeddings of 1024, 32 Ki tokens add fp32", "dram_write_bytes"): (
        "54.9 MB are written where all programs are simulated, which is 97% of what was measured; the rows that the first "
        "programs add to stand for 100 MB, and the 18,206 words that are drawn have 74.6"
    ),
    ("gradients of 50,257 embeddings of 1024, 32 Ki tokens add fp32", "dram_bytes"): _THEIR_WORDS,
    ("maxima over 20 neighbors of 256 Ki nodes of 64 fp16", "dram_read_bytes"): _NEIGHBORS,
    ("maxima over 20 neighbors of 256 Ki nodes of 64 fp16", "dram_bytes"): _NEIGHBORS,
    (_SPARSE, "dram_read_bytes"): _BLOCKS,
    (_SPARSE, "dram_bytes"): _BLOCKS,
    # ---- the third set
    ("bits that 4 Mi codes of 512 differ in", "l2_read_sectors"): (
        "L1 has lost 26% of the sectors before the last of their words is asked for; 12% in the model, in which the warps of a "
        "program load together"
    ),
    ("matmul 2048 fp32 in three tf32 parts", "dram_read_bytes"): _NEAR_THE_SIZE.format("17.3", "8.3"),
    ("matmul 2048 fp32 in three tf32 parts", "dram_bytes"): (
        "8.3 of the 14.7 MB that lack: " + _NEAR_THE_SIZE.format("17.3", "8.3")
    ),
    ("16 experts of 2048 x 2048 bf16, 128 tiles of 64 rows", "dram_read_bytes"): _EXPERTS,
    ("16 experts of 2048 x 2048 bf16, 128 tiles of 64 rows", "dram_bytes"): _EXPERTS,
    ("3 x 3 convolution of 16 images of 56 x 56 x 256 fp16 as products", "l2_read_sectors"): (
        "one of the two programs looked at is at an image's edge: their masks leave out 15.7% of the pixels, those of all "
        "programs 2.4% (1 - (166 / 168)^2), which gives the 57,118,720 that were measured"
    ),
    ("3 x 3 convolution of 16 images of 56 x 56 x 256 fp16 as products", "dram_read_bytes"): _AS_NEW.format(
        "380", "25.7"
    ),
    ("3 x 3 convolution of 16 images of 56 x 56 x 256 fp16 as products", "dram_bytes"): _AS_NEW.format("380", "25.7"),
    ("48 planes of 512 x 512 fp32, bilinear, twice as large", "dram_read_bytes"): _AS_NEW.format("226", "50.3"),
    ("48 planes of 512 x 512 fp32, bilinear, twice as large", "dram_bytes"): _AS_NEW.format("226", "50.3"),
    ("16384 rows of 5000 bf16, each rolled by its own shift", "l2_write_sectors"): (
        "the two programs looked at store rows that begin with a sector; in every other row a warp's 64 bytes reach over "
        "three sectors and not two. With 33 programs looked at the ratio is 1.02"
    ),
    ("positive ones of 64 Mi int32 moved together", "l2_write_sectors"): (
        "39% of the stores that could meet their neighbor's reach L2 alone; the model takes 1/5"
    ),
    ("distances of 4096 and 4096 points in 64 dimensions", "l2_read_sectors"): (
        "the ten programs of an SM have lines of 160 KiB in use, 256 bytes apart, in an L1 of 224 KiB: 68% of the sectors are "
        "lost before their last element is asked for, and none in the model"
    ),
    ("distances of 4096 and 4096 points in 64 dimensions", "dram_bytes"): _KEEPS.format("22", "37"),
    ("all sums of 16384 and 8192 numbers, stored in bf16", "l2_read_sectors"): (
        "L1 has room for all that a and b hold. Were each program to run on an SM that chance draws, it would find there a "
        "fifth of its share of a, and mostly its share of b: 239,300 sectors are then read, and the model, in which "
        "programs go to the SMs in turn, looks at the first ones alone"
    ),
    ("all sums of 16384 and 8192 numbers, stored in bf16", "dram_read_bytes"): _AS_NEW.format("1.26", "0.07"),
    ("Hadamard transform of 16 Mi fp32 in 24 launches", "l2_write_sectors"): (
        "in the first three launches two stores, on lines of their own, fill each sector: 46% of them met on the way to L2, "
        "and none in the model"
    ),
    ("Hadamard transform of 16 Mi fp32 in 24 launches", "dram_write_bytes"): _KEEPS.format("20", "35"),
    ("Hadamard transform of 16 Mi fp32 in 24 launches", "dram_bytes"): _KEEPS.format("20", "35"),
    ("16 steps of diffusion on 2048 x 2048 fp32", "dram_bytes"): (
        "in each of its 16 launches 3.8 MB that others had left in L2 are written back; what is read agrees"
    ),
    # ---- the two halves
    ("causal attention, 16 heads of 128, 8192 tokens, 64x64", "dram_read_bytes"): _ONCE.format("100.7", "76.5"),
    ("causal attention, 16 heads of 128, 8192 tokens, 64x64", "dram_bytes"): _ONCE.format("100.7", "76.5"),
    ("causal attention, 32 heads of 64, 4096 tokens, 64x64", "dram_read_bytes"): _ONCE.format("50.3", "41.0"),
    ("causal attention, 32 heads of 64, 4096 tokens, 64x64", "dram_bytes"): _ONCE.format("50.3", "41.0"),
    ("one token, 64 rows of 8192 in pages, 8 parts", "dram_bytes"): _ONCE.format("268.4", "242.6"),
    ("persistent transposition of 8192 x 8192 bf16", "dram_read_bytes"): _ONCE.format("134.2", "108.6"),
    ("one token, 8 rows of 65536 in pages, 64 parts", "dram_bytes"): _ONCE.format("268.4", "248.0"),
    ("add tiles of 8192 x 5002 fp32", "dram_write_bytes"): (
        "rows of 5002 numbers begin within a sector: 163.9 MB are stored, and L2 kept 10.8 of them. In the model sectors that two programs "
        "fill are written before the second one comes, and again"
    ),
    ("1024 columns, drawn, of 32768 rows of 4096 fp32", "l2_read_sectors"): (
        "L1 has lost 5% of a row's sectors before another of their columns is asked for, and none in the model"
    ),
    ("matmul 4096 fp8, a @ b.T, 128x256x128", "dram_read_bytes"): _NEAR_THE_SIZE.format("59.7", "35.1"),
    ("matmul 4096 fp8, a @ b.T, 128x256x128", "dram_bytes"): _NEAR_THE_SIZE.format("59.7", "35.1"),
    ("laplacian of 256 x 512 x 512 fp32", "l2_write_sectors"): _MEET.format("17%"),
    ("laplacian of 256 x 512 x 512 fp32", "dram_read_bytes"): _AS_NEW.format("317", "268.4"),
    ("unpack 4 bits to fp16, 64 Mi bytes", "dram_read_bytes"): (
        "two stores fill each sector; 3% of the sectors (7.9 MB) are read from device memory before the second one comes, and none in the "
        "model"
    ),
    ("layer norm, 16384 rows of 5003 bf16", "l2_read_sectors"): _COLD.format(
        "the 1,252 sectors of weights and biases", "0.17", "16", "1.28"
    ),
    ("matmul 2047 x 4097 x 2051 bf16, masked", "l2_read_sectors"): (
        "not known in part. A row of an odd number begins within a sector, which the next turn asks for again: 22% of what loads asked for "
        "was found in L1, and 38% in the model"
    ),
    ("matmul 2047 x 4097 x 2051 bf16, masked", "l2_write_sectors"): _ALONE.format("64%", "1/5", ""),
    ("matmul 2047 x 4097 x 2051 bf16, masked", "dram_bytes"): (
        "12.3 MB were written while it ran, of the 8.4 MB that it stores and of what others had left in L2, and 1.8 in the model; the row "
        "above is about what is read"
    ),
    ("matmul 2047 x 4097 x 2051 bf16, masked", "dram_read_bytes"): (
        "25.2 MB are given, of which the GPU read 6.6 twice. The model read 13.3 MB more to complete sectors that two programs fill; it was "
        "fixed afterwards, and says 25.3"
    ),
    ("binary search in 16 Mi, 2 Mi queries", "l2_read_sectors"): (
        "not known. Of the sectors that are asked for L1 has 25%, and 46% in the model, in which each place of L1 is one sector of the table. "
        "A line of 128 bytes, of which a search uses one sector, may take four"
    ),
    ("binary search in 16 Mi, 2 Mi queries", "dram_read_bytes"): _SEARCHED,
    ("binary search in 16 Mi, 2 Mi queries", "dram_bytes"): _SEARCHED,
    ("linked lists in 8 MiB, 132 programs", "dram_read_bytes"): _LISTS,
    ("linked lists in 8 MiB, 132 programs", "dram_bytes"): _LISTS,
    ("softmax, 32768 rows of 3001 fp16", "l2_write_sectors"): _RAGGED.format("44%"),
    ("layer norm, 16384 rows of 5003 bf16", "l2_write_sectors"): _RAGGED.format("35%"),
    ("concatenate rows of 1000 and of 1001 bf16", "l2_write_sectors"): (
        "the two rows looked at begin with a sector, as most do not. With 33 rows looked at the ratio is 0.97"
    ),
    ("copy of 100,000,003 bf16 to a place shifted by 3", "l2_write_sectors"): (
        "64% of the stores that could meet their neighbor's reach L2 alone, and 21% in the model"
    ),
    ("stores of half the elements, chosen at random", "l2_write_sectors"): _MEET.format("4%"),
}

# Of an H200.
_READ, _WRITTEN, _BOTH, _ASKED, _STORED = (
    "dram_read_bytes", "dram_write_bytes", "dram_bytes", "l2_read_sectors", "l2_write_sectors"
)  # fmt: skip
_LEFT = "of the {} MB that {} L2 keeps {} when it ends, and {} in the model; what is read agrees"
_NEW_ROWS = (
    "each of the 277.2 MB that the kernel is given is read, and 18.7 of them twice; samples of 2 and of 264 programs take 102 and 123 MB to be new "
    "to L2, which programs of one expert share, whose weights have 8.4 MB"
)
_MUON = _NEAR_THE_SIZE_TOO.format("58.7", "read", "50%", "85.5", "read 69.8: all 11.0 more in its third launch")
_ONE_STAGE = (
    "22.3 MB are read where all programs are simulated, which is 101% of what was measured; the two programs that were looked at "
    "share less with their neighbors than others do. The GPU wrote 4.8 MB while it ran, and the model 0.2"
)
_SIXTEEN_WARPS = _ALL.format(
    "105.7", "100.0%", "the two programs that were looked at share less with their neighbors than others do"
)
_SPILLED_TWICE = (
    "SASS stores 64 pairs of words of each thread to local memory in each of 64 turns, and loads them again: 67.1 M sectors, where the "
    "model counts the 1,056 bytes of its spills once. "
)
_BITS = _GATHERS.format(
    "277 MB are then read and 520 written of a table of 8.4. Keys and table have 75.5 MB, which is what was read"
)
_BY_INDICES = (
    "not known in part: 85% of the 16.8 M numbers that are gathered brought 64 bytes from device memory, and 69% in the model, in which "
    "L2 keeps 43 of the 134 MB they are in. The GPU kept 20: as if of a line of 128 bytes half were there"
)
_PIECES = (
    "20% of the sectors, of which two programs fill half each, are read from device memory before their other half comes (67 MB), and "
    "none in the model"
)
_WORD_BYTES = _NEAR_THE_SIZE_TOO.format("39.6", "read", "50%", "71.9", "read 46.6")

# Kernels of the last three sets with several rows, and what several have in common.
_CHUNKS = "chunks of 1 to 700 tokens of 14 prompts after up to 5000 in pages of 16, 32 heads of 128 share 8 bf16, 64x64"
_HISTORIES = (
    "attention with SiLU in 48 histories of 100 to 2000, 8 heads of 64 fp16, a bias by distance, 64x32, 1 stage"
)
_SIGNATURES = "signatures of 128 hashes of 24 Ki documents of 20 to 1500 words int32, 8 words at a time, 2 warps"
_MACHINES = "factorization machines of 150,000 samples of 39 of 8,000,000 features of 16 fp32, 32 per program"
_CIPHER = "3,000,000 blocks of 64 bytes encrypted by a stream cipher of 20 rounds, 128 per program"
_LOOKED_AT = "the {} of {} programs that were looked at have {} to do in the mean than all have"
_READ_AGAIN = "not known in part: the model, whose programs keep step, reads {} MB; the GPU reads {}, of operands of {}"
_BOXES = "which of 16384 boxes overlap by half, as bits, 64 by 16 x 32 per program"
_EXPERTS = "4 of 64 experts for 4096 tokens, rows gathered, 2048 to 1408 bf16, 64x128x64, 4 warps"
_IN_L1 = "not known in part: L1 had {} of what loads asked for, and {} of it in the model"
_PREFIX = "attention with a prefix of 2048, 16 heads of 64, 8192 tokens fp16, 128x64, 4 warps"
_PADDED = "64 sequences of 1 to 4096 rows of 515 fp16 without their padding"
_BAGS = "means of 32 Ki bags of 1 to 400 rows of 64 fp16, {}, 2 warps"
_LENGTHS_DIFFER = "the {} programs that were looked at have {} to do in the mean than all have; today's model looks at others, and the ratio is {}"
_FIRST_ONES = "what the first programs read was taken for what as many others do, and their bags {}; it was fixed afterwards, and the ratio is {}"

# (kernel, counters, reason)
_ON_H200: list[tuple[str, tuple[str, ...], str]] = [
    # ---- the project's own kernels
    ("matmul 4096, descriptors, persistent", (_READ, _BOTH), "not known: 178.8 MB were counted, and 213.5 are in the model"),
    ("48 MiB twice", (_READ,), "the model lets the programs of a wave load in step, so that half of the bytes are read again after 32 MiB of others, and not after 48 as on the GPU; passes over 48 MiB agree"),
    ("gpukit softmax 4096x4096 bf16", (_BOTH,), "of the 33.6 MB that it stores 9.5 were written while it ran, and 19 are in the model, which goes by passes that only store"),
    # ---- the twelfth set
    ("attention of 20 sounds of 200 to 900 frames, 8 heads of 64 fp16, scores of 1799 distances added, 64x64, 4 warps, 3 stages", (_ASKED,), "not known: 14.48 million sectors were counted, and 11.48 are in the model"),
    ("attention of 20 sounds of 200 to 900 frames, 8 heads of 64 fp16, scores of 1799 distances added, 64x64, 4 warps, 3 stages", (_STORED,), "the programs that were looked at store 6% less than the mean of all"),
    ("one token of 40 sequences of 500 to 16,000, 64 heads of 128 share 8, cache of 4 bits, 8 parts and their sum, 4 warps, 3 stages", (_ASKED, _READ, _BOTH,), "the programs that were looked at have three quarters of the tokens that all have in the mean"),
    ("scores of 5000 documents of 20 to 180 words for 16 queries of 32 words by best words, 128 fp16, 128x64, 4 warps, 3 stages", (_ASKED,), "not known: 35.96 million sectors were counted, and 28.87 are in the model"),
    ("scores of 5000 documents of 20 to 180 words for 16 queries of 32 words by best words, 128 fp16, 128x64, 4 warps, 3 stages", (_READ,), "not known: 128.6 MB were counted, and 99.1 are in the model"),
    ("scores of 5000 documents of 20 to 180 words for 16 queries of 32 words by best words, 128 fp16, 128x64, 4 warps, 3 stages", (_BOTH,), "not known: 131.2 MB were counted, and 99.4 are in the model"),
    ("rows of 26 tables of 4 to 4,000,000 rows of 64 fp16 for 70,001 samples, some popular, one sample per program of 2 warps", (_ASKED,), "not known in part: popular rows, which L1 has more often than in the model"),
    ("rows of 26 tables of 4 to 4,000,000 rows of 64 fp16 for 70,001 samples, some popular, one sample per program of 2 warps", (_READ,), "not known in part: popular rows, which L2 has more often than in the model"),
    ("24,000,001 numbers of 1 to 9 digits in text to int32, places known, 256 per program, 4 warps", (_STORED,), "programs store from within a sector on: 6% more of the stores that could meet their neighbor's reach L2 alone"),
    ("80,000 bars of 1 to 3000 trades fp32 and int32, six columns, one bar per program of 1 warp, 128 at a time", (_READ, _BOTH,), "programs that are worked out from a few ragged ones lay across one another, and found each other's bytes in L2; it was fixed afterwards, and the ratio is 1.00"),
    ("gradients of tanh of 20,001 rows of 3600 bf16, scales and shifts in 66 parts and their sum, 4 x 512 at a time, 4 warps", (_ASKED, _STORED,), "not known in part: the programs that were looked at have 14% more to do than the mean of all"),
    ("gates of 160 experts of up to 1000 rows of 2 x 2048 bf16, to int8 with scales of 128, 16 x 128 per program of 4 warps", (_ASKED,), "not known: 17.08 million sectors were counted, and 12.59 are in the model"),
    ("gates of 160 experts of up to 1000 rows of 2 x 2048 bf16, to int8 with scales of 128, 16 x 128 per program of 4 warps", (_STORED,), "the programs that were looked at have 8% fewer rows than the mean of all"),
    ("losses and gradients of 60,000 ranked lists of 20 to 512 scores fp32, two scans, 2 warps", (_ASKED, _READ, _BOTH,), "the lists that were looked at are 11% longer than the mean of all"),
    ("losses and gradients of 60,000 ranked lists of 20 to 512 scores fp32, two scans, 2 warps", (_STORED,), "lists begin within a sector, and nearly all of the stores that could meet reach L2 alone; in the model a third of them do"),
    ("nearest of 3000 seeds for 1800 x 2101 pixels int32, jumps of 1024 to 1, 11 launches, 256 per program, 4 warps", (_ASKED,), "the programs that were looked at have fewer lanes masked off than the mean: they ask for 10% more"),
    ("a @ u + b @ v of 2500 x 5504 and 5504 x 4096 bf16, tiles in groups of 8, 128x256x64, 16 warps, 3 stages", (_READ,), "not known: 335.6 MB were counted, and 300.6 are in the model"),
    ("60,000 rows of 2048 fp16 from trains of three tensors of rank 16 for 100,000 words, some popular, 1 warp per row", (_ASKED,), "not known: 7.91 million sectors were counted, and 7.07 are in the model"),
    ("all pairs of 90 x 64 pixels of 2 times 2 pictures of 256 features fp16, and means of 2 x 2, descriptors, 128x128x64, 8 warps, 4 stages", (_READ,), "not known: 11.8 MB were counted, and 9.0 are in the model"),
    ("four gates of 2 of 24 bits of a state of 16 Mi complex fp32, 4 launches, 256 fours per program, 4 warps", (_WRITTEN,), "a kernel that reads and stores at the rate of device memory leaves more of what it stores in L2 when it ends than passes that only store, by which the model goes"),
    ("densities of particles in 32 x 32 x 32 cells of 0 to 31 each fp32, 27 cells around, one cell per program of 1 warp", (_ASKED,), "not known: 4.14 million sectors were counted, and 5.19 are in the model"),
    ("densities of particles in 32 x 32 x 32 cells of 0 to 31 each fp32, 27 cells around, one cell per program of 1 warp", (_READ, _BOTH,), "not known: 6.2 MB were counted, and 16.8 are in the model"),
    # ---- the eleventh set
    ("sums of results times gradients, 5 sequences of 5001 tokens, 32 heads of 128 bf16, 16 tokens of a head, 2 warps", (_STORED,), "not known in part: rows of 5001 numbers begin within a sector, and more of the stores that could meet their neighbor's reach L2 alone"),
    ("keys of 200,000 tokens, 8 heads of 128 bf16, pooled in blocks of 32 that begin every 16 tokens, 4 warps", (_ASKED,), "not known: 26.16 million sectors were counted, and 29.28 are in the model"),
    ("normals of a mesh of 2000 x 1501 points fp32, 2 faces between each four, in pieces of 64 in any order, 128 per program", (_READ,), "not known: 219.0 MB were counted, and 259.8 are in the model"),
    ("normals of a mesh of 2000 x 1501 points fp32, 2 faces between each four, in pieces of 64 in any order, 128 per program", (_WRITTEN,), "not known: 57.9 MB were counted, and 65.4 are in the model"),
    ("normals of a mesh of 2000 x 1501 points fp32, 2 faces between each four, in pieces of 64 in any order, 128 per program", (_BOTH,), "not known: 276.9 MB were counted, and 325.3 are in the model"),
    ("searches of 8,000,001 int32 in a tree of 5 levels of 16 keys, 32 per program of 2 warps", (_ASKED,), "not known in part: the upper levels of the tree are read by all lanes, and L1 has them more often than in the model"),
    ("16,200 lines of 1920 pixels of 3 bytes and one byte before them, sums along lines, 8 warps", (_STORED,), "three statements store the colors of a pixel side by side, and 0.85 of their sectors reach L2; in the model six tenths do, since a third of those that could meet does not"),
    ("8 bells and a SiLU of 70,001 rows of 1000 channels fp16, tiles of 16 x 128, 4 warps", (_READ,), "not known: 173.4 MB were counted, and 216.1 are in the model"),
    ("8 bells and a SiLU of 70,001 rows of 1000 channels fp16, tiles of 16 x 128, 4 warps", (_BOTH,), "not known: 308.7 MB were counted, and 348.3 are in the model"),
    ("waves of 200 tracks of 30,001 samples fp16 bent between two filters of 12, 256 per program, 4 warps", (_STORED,), "tracks of 30,001 samples begin within a sector: 5% more of the stores that could meet their neighbor's reach L2 alone"),
    ("3 x 3 convolution of 50 pictures of 42 x 43, 256 to 256 channels int8, scales, shifts and ReLU, 128x128x64, 8 warps, 4 stages", (_BOTH,), "not known: 30.5 MB were counted, and 24.4 are in the model"),
    ("filters of 5 x 5 pixels that keep edges, 10 pictures of 1500 x 2001 fp16, 256 per program, 4 warps", (_STORED,), "lines of 2001 pixels begin within a sector: 8% more of the stores that could meet their neighbor's reach L2 alone"),
    ("differences of two views of 1200 x 2001 words of 64 bits, 64 places each, 256 per program, 8 warps", (_STORED,), "lines of 2001 places begin within a sector, and more of the stores that could meet their neighbor's reach L2 alone"),
    ("pyramids of 40 planes of 1537 x 2050 fp16, 7 launches, each half as large, 256 per program, 2 warps", (_STORED,), "lines of odd lengths begin within a sector: 7% more of the stores that could meet their neighbor's reach L2 alone"),
    ("pyramids of 40 planes of 1537 x 2050 fp16, 7 launches, each half as large, 256 per program, 2 warps", (_READ,), "not known: 336.3 MB were counted, and 264.1 are in the model"),
    ("pyramids of 40 planes of 1537 x 2050 fp16, 7 launches, each half as large, 256 per program, 2 warps", (_WRITTEN,), "not known: 69.7 MB were counted, and 43.9 are in the model"),
    ("pyramids of 40 planes of 1537 x 2050 fp16, 7 launches, each half as large, 256 per program, 2 warps", (_BOTH,), "not known: 406.0 MB were counted, and 308.0 are in the model"),
    ("preconditioners of 40 gradients of 1000 x 772, tf32, 64x64x32, 4 warps, 4 stages", (_ASKED,), "not known: 139.40 million sectors were counted, and 130.16 are in the model"),
    ("means over 120 sequences of outer products of 32 channels of 365 places bf16, 128x128x32, 8 warps, 3 stages", (_READ,), "not known: 6.4 MB were counted, and 5.3 are in the model"),
    ("200 rows fp16 by 10,240 x 6144 weights of 16 levels from a table, scales of 64, 64x64x64, 4 warps, 2 stages", (_STORED,), "200 rows are stored by tiles of 64, and the programs that were looked at store whole ones; the last of four has 8 rows"),
    ("200 rows fp16 by 10,240 x 6144 weights of 16 levels from a table, scales of 64, 64x64x64, 4 warps, 2 stages", (_ASKED,), "not known: 19.91 million sectors were counted, and 18.73 are in the model"),
    ("2000 rows bf16 by 6144 x 4096 weights of which two in four are there, 128x128x64, 8 warps, 3 stages", (_READ,), "not known: 54.0 MB were counted, and 47.9 are in the model"),
    ("2000 rows bf16 by 6144 x 4096 weights of which two in four are there, 128x128x64, 8 warps, 3 stages", (_BOTH,), "not known: 71.5 MB were counted, and 57.1 are in the model"),
    ("logits of 8001 of 250,000 words fp8 that are drawn, for 6000 rows of 1024, 128x256x128, 16 warps, 3 stages", (_READ, _BOTH,), "the words that are drawn come from an index tensor, a list for all programs. Their rows have 8 MB, which is read once with the inputs; the model lets each program that was looked at stand for others with rows of their own"),
    ("logits of 8001 of 250,000 words fp8 that are drawn, for 6000 rows of 1024, 128x256x128, 16 warps, 3 stages", (_STORED,), "not known: 5.07 million sectors were counted, and 4.18 are in the model"),
    ("logits of 8001 of 250,000 words fp8 that are drawn, for 6000 rows of 1024, 128x256x128, 16 warps, 3 stages", (_WRITTEN,), "not known: 78.7 MB were counted, and 89.0 are in the model"),
    ("matmul 6000 x 5000 x 2048 fp16, sums in fp16, descriptors, 132 programs, 128x256x64, 8 warps, 3 stages", (_ASKED,), "not known: 50.05 million sectors were counted, and 46.30 are in the model"),
    ("matmul 6000 x 5000 x 2048 fp16, sums in fp16, descriptors, 132 programs, 128x256x64, 8 warps, 3 stages", (_STORED,), "not known: 2.11 million sectors were counted, and 1.94 are in the model"),
    ("matmul 6000 x 5000 x 2048 fp16, sums in fp16, descriptors, 132 programs, 128x256x64, 8 warps, 3 stages", (_READ,), "not known: 165.8 MB were counted, and 222.2 are in the model"),
    ("matmul 6000 x 5000 x 2048 fp16, sums in fp16, descriptors, 132 programs, 128x256x64, 8 warps, 3 stages", (_BOTH,), "not known: 220.0 MB were counted, and 274.8 are in the model"),
    ("7000 rows of 64 blocks of 64 bf16 times a matrix each, columns dealt out, 64x64x64, 2 warps", (_READ, _WRITTEN, _BOTH,), "columns are dealt out, so that a program stores single elements of lines that 63 others complete. On the GPU most lines are whole before they leave L2; in the model they leave it before, and are read again"),
    ("7000 rows of 64 blocks of 64 bf16 times a matrix each, columns dealt out, 64x64x64, 2 warps", (_ASKED,), "not known: 3.09 million sectors were counted, and 3.60 are in the model"),
    ("filters of 1000 moments of 640 channels, 64 sequences each bf16, by products, 64x64x32, 4 warps, 3 stages", (_READ,), "not known: 83.2 MB were counted, and 47.3 are in the model"),
    ("filters of 1000 moments of 640 channels, 64 sequences each bf16, by products, 64x64x32, 4 warps, 3 stages", (_WRITTEN,), "not known: 66.4 MB were counted, and 53.0 are in the model"),
    ("filters of 1000 moments of 640 channels, 64 sequences each bf16, by products, 64x64x32, 4 warps, 3 stages", (_BOTH,), "not known: 149.7 MB were counted, and 100.3 are in the model"),
    ("networks of 32, 4 times 64 and 16 numbers for 2,500,001 samples fp16, 128 per program of 4 warps", (_ASKED,), "not known: 5.77 million sectors were counted, and 7.34 are in the model"),
    ("densities of 200,001 points of 64 fp32 in mixtures of 32 parts, tf32, 128x64x64, 8 warps, 1 stage", (_ASKED,), "not known in part: L1 loses what one pass over the parts has read before the next one more often than in the model"),
    ("products of 150,001 pairs of integers of 32 words int32, places in turn, 64 per program of 2 warps", (_ASKED,), "not known in part: words of one integer are loaded one by one, and L1 loses their sectors more often than in the model"),
    # ---- the tenth set
    ("attention along 160 rows of 385, biases of pairs and gates, 8 heads of 32 bf16, 64x32, 2 warps, 1 stage", (_STORED,), "rows of 385 are stored by tiles of 32, and the programs that were looked at store whole ones, which most do, but not the last of a row"),
    ("attention of pixels to 7 x 7 around them, 6 pictures of 60 x 60, 8 heads of 32 fp16, 32 pixels of a line, 4 warps", (_STORED,), "lines of 60 pixels are stored by 32 and 28, and both programs that were looked at store 32"),
    ("300 rows fp16 by 12,288 x 8192 weights fp4, scales fp8 of 16, 64x128x64, 8 warps, 3 stages", (_STORED,), "300 rows are stored by tiles of 64, and the programs that were looked at store whole ones; the last of five has 44 rows"),
    ("12,000,001 points turned by quaternions of their own fp32, 64 per program of 1 warp", (_STORED,), "each lane stores three neighbors of 4 bytes one after another. 22% of the stores that could meet in L1 on the way to L2 reach it alone, and all in the model"),
    ("16 Mi keys int32 put in place by 4 of their bits, places known for each 1024, 8 warps", (_STORED,), "not known in part: keys of one digit go side by side, and what two warps store to one sector meets in the model, and not on the GPU"),
    ("96 Ki bags of 1 to 60 of 3,000,000 rows of 128 bytes, a scale and an offset, to fp16, 4 rows at a time, 1 warp", (_ASKED,), "codes, scale and offset of a row are loaded by three instructions, which share sectors. L1 has these on the GPU; the model lets each of them ask L2: 7.6 sectors for a row, and 5.3 were counted"),
    ("96 Ki bags of 1 to 60 of 3,000,000 rows of 128 bytes, a scale and an offset, to fp16, 4 rows at a time, 1 warp", (_READ, _BOTH,), "what L1 is wrongly said to lack is read from device memory for each of the three loads, too"),
    ("200,000 pieces of lines of 1 to 4000 fp32 written one after another, one per program of 1 warp, 128 at a time", (_WRITTEN, _BOTH,), "the places to which programs write come from a tensor, and follow one another; the model has them all store to the same lines, which are in L2 when it ends"),
    ("200,000 pieces of lines of 1 to 4000 fp32 written one after another, one per program of 1 warp, 128 at a time", (_READ,), "lengths and places have 2.4 MB, which is what was read; the model reads parts of the result, too, which programs share"),
    ("checksums of 600,001 messages of 384 bytes, a table of 256 int32 for each byte in turn, 64 per program of 2 warps", (_ASKED,), "the table of 1 KiB is looked up by bytes of the message, and messages of 384 bytes are read word by word. Messages have 7.2 million sectors, and each of them is asked for 5.2 times: L1 loses it before its next word is read, and keeps it in the model"),
    ("two steps of the game of life on 24,000 x 32,064 cells, 64 in a word, 256 words per program, two launches", (_ASKED,), "not known in part: the rows above and below are read by other programs, too, and L1 has them more often than in the model"),
    ("a step with two means of gradients, 25,000,003 fp32 and bf16, 10 streams, 1024 per program", (_STORED,), "not known in part: more of the stores that could meet their neighbor's reach L2 alone than in the model"),
    ("penalties of 6000 words each in 500 rows of 128,259 logits bf16 to fp32, counted by atomics, two launches", (_STORED,), "not known: 11.42 million sectors were counted, and 16.03 are in the model"),
    ("gradients of group norm, 48 images of 320 channels of 63 x 63 bf16, 32 groups, atomics for scales, 8 warps", (_STORED,), "planes of 63 x 63 begin within a sector: 6% more of the stores that could meet their neighbor's reach L2 alone"),
    ("sparse softmaxes of 16 Ki rows of 5000 fp16, 20 halvings, 8 warps", (_STORED,), "rows of 10,000 bytes begin within a sector: 6% more of the stores that could meet their neighbor's reach L2 alone"),
    ("colors of 2160 x 3840 pixels of 3 bytes from a table of 33 x 33 x 33 x 3 fp32 to fp16, 512 per program", (_ASKED,), "not known in part: the table has 431 KB, and L1 has more of what is asked for than in the model"),
    ("12 tracks of 2001 moments of 512 fp16 to 8 times as many of 256, 16 taps, 128x64x32, 4 warps, 4 stages", (_READ, _WRITTEN, _BOTH,), "not known in part: the result is stored in pieces that programs share, and the GPU reads and writes 41 and 27 MB more than the model, as if these left L2 before they were full"),
    ("losses of 1000 lattices of up to 240 moments and 63 words fp32, diagonal by diagonal, 1 warp", (_ASKED,), "L1 loses what the diagonal before has read more often than in the model"),
    ("losses of 1000 lattices of up to 240 moments and 63 words fp32, diagonal by diagonal, 1 warp", (_BOTH,), "10 MB that the kernel writes leave L2 while it runs, and stay there in the model"),
    ("attention all in fp8, scales of blocks, 16 heads of 128, 4096 tokens, 128x64, 8 warps, 3 stages", (_BOTH,), "not known: 28.8 MB were counted, and 25.2 are in the model"),
    ("causal attention, 16 heads of 128 and 64 that share keys, 6100 tokens bf16, 128x64, 8 warps, 2 stages", (_READ,), "not known: 88.3 MB were counted, and 70.9 are in the model"),
    ("causal attention, 16 heads of 128 and 64 that share keys, 6100 tokens bf16, 128x64, 8 warps, 2 stages", (_BOTH,), "not known: 107.1 MB were counted, and 85.8 are in the model"),
    ("attention along 160 rows of 385, biases of pairs and gates, 8 heads of 32 bf16, 64x32, 2 warps, 1 stage", (_ASKED,), "not known: 26.50 million sectors were counted, and 30.44 are in the model"),
    ("attention of pixels to 7 x 7 around them, 6 pictures of 60 x 60, 8 heads of 32 fp16, 32 pixels of a line, 4 warps", (_READ,), "not known: 33.2 MB were counted, and 22.5 are in the model"),
    ("attention of pixels to 7 x 7 around them, 6 pictures of 60 x 60, 8 heads of 32 fp16, 32 pixels of a line, 4 warps", (_BOTH,), "not known: 37.8 MB were counted, and 22.5 are in the model"),
    ("2,500,000 products of rows of 128 of 400,000 fp16, rows in order and columns in any, 16 per program", (_READ,), "not known: 566.2 MB were counted, and 715.4 are in the model"),
    ("2,500,000 products of rows of 128 of 400,000 fp16, rows in order and columns in any, 16 per program", (_BOTH,), "not known: 578.1 MB were counted, and 724.8 are in the model"),
    ("gradients of group norm, 48 images of 320 channels of 63 x 63 bf16, 32 groups, atomics for scales, 8 warps", (_ASKED,), "not known: 14.67 million sectors were counted, and 13.80 are in the model"),
    ("gradients of group norm, 48 images of 320 channels of 63 x 63 bf16, 32 groups, atomics for scales, 8 warps", (_READ,), "not known: 381.9 MB were counted, and 433.8 are in the model"),
    ("gradients of group norm, 48 images of 320 channels of 63 x 63 bf16, 32 groups, atomics for scales, 8 warps", (_BOTH,), "not known: 490.5 MB were counted, and 545.9 are in the model"),
    ("a step with two means of gradients, 25,000,003 fp32 and bf16, 10 streams, 1024 per program", (_ASKED,), "not known: 15.74 million sectors were counted, and 14.06 are in the model"),
    ("3 x 3 x 3 convolution of 13 frames of 90 x 157, 128 to 128 channels bf16, bias and SiLU, 128x128x32, 8 warps, 4 stages", (_READ,), "not known: 48.0 MB were counted, and 70.8 are in the model"),
    ("3 x 3 x 3 convolution of 13 frames of 90 x 157, 128 to 128 channels bf16, bias and SiLU, 128x128x32, 8 warps, 4 stages", (_BOTH,), "not known: 83.2 MB were counted, and 99.7 are in the model"),
    ("64 planes of 1200 x 1600 bytes to 384 x 512 fp16, 15 taps across and 15 down by tables, two launches", (_ASKED,), "not known: 16.00 million sectors were counted, and 19.03 are in the model"),
    ("64 planes of 1200 x 1600 bytes to 384 x 512 fp16, 15 taps across and 15 down by tables, two launches", (_WRITTEN,), "not known: 85.3 MB were counted, and 76.4 are in the model"),
    ("complex matmul 3000 x 2008 x 1504 fp16 by three real products, 64x64x32, 4 warps, 3 stages", (_ASKED,), "not known: 36.24 million sectors were counted, and 38.45 are in the model"),
    ("complex matmul 3000 x 2008 x 1504 fp16 by three real products, 64x64x32, 4 warps, 3 stages", (_BOTH,), "not known: 49.8 MB were counted, and 37.8 are in the model"),
    ("96 products a @ b.T of 501 x 501 bf16 behind a gate, rows of odd length, 64x64x32, 4 warps, 2 stages", (_READ,), "not known: 144.6 MB were counted, and 159.8 are in the model"),
    ("two of 32 experts for 8192 tokens, 2048 to 1024 pairs int8 and their gates, 64x64x128, 4 warps, 3 stages", (_READ,), "not known: 163.4 MB were counted, and 190.5 are in the model"),
    ("two of 32 experts for 8192 tokens, 2048 to 1024 pairs int8 and their gates, 64x64x128, 4 warps, 3 stages", (_BOTH,), "not known: 193.6 MB were counted, and 218.0 are in the model"),
    ("Fourier transforms of 12,000 rows of 4096 complex fp16, by 8 products of 64 x 64 x 64, 4 rows per program, 4 warps", (_ASKED,), "not known: 9.60 million sectors were counted, and 8.04 are in the model"),
    ("kernel of 20,000 and 20,000 points of 50 fp32 times a vector, a tf32 product inside, 64x64x64, 4 warps, 1 stage", (_ASKED,), "not known: 17.01 million sectors were counted, and 16.09 are in the model"),
    # ---- the ninth set
    (_CHUNKS, (_STORED,), _LOOKED_AT.format("30", "4,928", "15% less")),
    (
        _CHUNKS,
        (_READ, _BOTH),
        "not known in part: q, k and v have 189.7 MB, which is what is read. The model takes the pages that the first programs read for what "
        "others find in L2, and reads 39.9; and 32.9 MB are written while it runs, none in the model",
    ),
    (
        "causal attention less a second one, 16 heads of 2 x 64, 6144 tokens bf16, 64x64, 2 stages",
        (_READ, _BOTH),
        "not known in part: q, k and v have 75.5 MB, each of which is read once; the model takes a quarter of them to be in L2 already",
    ),
    (_HISTORIES, (_ASKED, _STORED), _LOOKED_AT.format("64", "12,288", "less")),
    (
        _HISTORIES,
        (_READ, _BOTH),
        "q, k and v have 165.1 MB, which is what is read. A sample takes the rows of each history to be at a place of its own for each program: "
        "where it begins is an integer in memory",
    ),
    (
        "scores of 4096 keys for the last 2048 queries, 64 heads of 128 fp8 that share a key, 128x128, 8 warps, 2 stages",
        (_ASKED, _STORED, _READ, _BOTH),
        "120 of the 512 programs are above the diagonal and end at once, and neither of the two that were looked at is one of these: 512 / 392 is "
        "1.306",
    ),
    (
        "attention of 200,003 nodes to 1 to 300 neighbors, 4 heads of 32 fp16, 8 neighbors at a time, 1 warp",
        (_ASKED, _READ, _BOTH),
        "two programs were looked at, alike because both have at most 8 neighbors, where the mean is 28. Today 64 are: 1.24 of the sectors. They "
        "are then taken to be read from places of their own, where the GPU reads popular nodes from L2",
    ),
    (
        _CIPHER,
        (_ASKED,),
        "not known in part: a lane loads 4 bytes of its block of 64 at a time. L1 had 80% of what was asked for, and 87% in the model",
    ),
    (
        _CIPHER,
        (_READ, _WRITTEN, _BOTH),
        "a block is stored 4 bytes at a time. On the GPU 57% of its sectors are read from device memory to be completed, and 45% written twice; in "
        "the model all are, and 76%",
    ),
    (
        "60,000,000 codes of 12 bits decoded by a table of 4096 int64, 1024 per program",
        (_ASKED,),
        "L1 had 96% of what was asked for, and 92% in the model: 32 KiB of table stay there from program to program, and a sample follows the first "
        "ones, which bring it",
    ),
    (_SIGNATURES, (_ASKED,), _LOOKED_AT.format("38", "24,576", "11% less")),
    (
        _SIGNATURES,
        (_READ, _BOTH),
        "the words have 38.0 MB, each of which is read once; the model takes two thirds of them to be in L2 already: where a document begins is "
        "an integer in memory",
    ),
    (
        "means of the middle 4 of 8 tensors of 25,000,001 bf16, by a sort, 512 per program",
        (_STORED,),
        "53% of the stores reach L2 alone, and 50% in the model",
    ),
    (
        "nearest of 10,000,000 points in 1024 x 2048 pixels, by atomics on int64, and depths fp32, two launches",
        (_BOTH,),
        "what is read agrees within 7%. Of what the atomics change the model writes 12.0 MB while it runs, and the GPU 3.2",
    ),
    (_MACHINES, (_ASKED,), "L1 had 66% of what was asked for, and 57% in the model: lanes that ask for one number meet more often"),
    (
        _MACHINES,
        (_READ, _BOTH),
        "a sample takes what each program gathers to be in a place where no other has been, and some features are in many samples",
    ),
    (
        "rows of 64 fp16 along 900,001 edges between 300,000 nodes added by atomics, 16 edges per program",
        (_READ, _WRITTEN, _BOTH),
        "a sample takes what each program gathers and adds to be in a place where no other has been: 201 MB are then read and 71 written, where "
        "the nodes have 77 MB and the edges 7",
    ),
    (
        "splats on 3600 tiles of 16 x 16 pixels, 5 to 800 of 400,000 each, 9 planes fp32, 2 warps",
        (_ASKED,),
        _LOOKED_AT.format("six", "3,600", "9% less"),
    ),
    ("colors of 300,000 rays of 128 steps fp16, by scans of 8 rays per program", (_ASKED,), _IN_L1.format("70%", "74%")),
    (
        "gates of 4096 x 5632 pairs fp16 inside a product with 5632 x 2048, 128x128x32, 8 warps, 3 stages",
        (_READ, _BOTH),
        _READ_AGAIN.format("209.1", "362.1", "115.4"),
    ),
    (
        "80 bands of 299,999 spectra of 201 complex fp32, a tf32 product and logarithms, 64x128x32, 4 warps",
        (_ASKED,),
        "not known in part: every second number of a row is loaded, and then the others. L1 had 69% of what was asked for, and 86% in the model",
    ),
    (
        "matmul 4096 x 6144 x 4096 int8, zero points of rows, sums of weights inside, 128x128x64, 8 warps, 5 stages",
        (_READ, _BOTH),
        _READ_AGAIN.format("41.0", "90.8", "42.0"),
    ),
    (
        "gradients of 48 experts' weights of 2048 x 768 by 40,000 rows bf16 in all, 128x128x64, 8 warps, 3 stages",
        (_READ, _BOTH),
        "rows and gradients have 225.2 MB, each of which is read; the model takes 28.7 of them to be in L2 already",
    ),
    (
        "40 products a.T @ b of 1000 x 712 x 800 fp16 and a share of c, descriptors of 3 dimensions, 128x64x64, 4 warps",
        (_STORED,),
        "the tiles at the edges hang over by 24 of 128 rows and 56 of 64 columns, which the descriptors neither load nor store; neither of the two "
        "programs that were looked at has such a tile",
    ),
    (
        "40 products a.T @ b of 1000 x 712 x 800 fp16 and a share of c, descriptors of 3 dimensions, 128x64x64, 4 warps",
        (_ASKED,),
        "not known. Half of the rows of 1,424 bytes begin within a sector, and boxes of 128 bytes of them touch five; the sample has both kinds",
    ),
    ("forces on 384 Ki atoms fp32 of 20 to 75 neighbors in lists, up to 3000 places away, 128 per program", (_ASKED,), _IN_L1.format("65%", "67%")),
    # ---- the eighth set
    (
        "attention with scores int8 and values fp16, 16 heads of 64, 6144 tokens, 128x64, 4 warps",
        (_ASKED,),
        "not known. L1 had none of what loads asked for, and 40% of it in the model",
    ),
    (
        "trees of 64 guesses after 24 sequences of 1000 to 8000 tokens, 32 heads of 128 share 8 bf16",
        (_ASKED,),
        "the sequences of the programs that were looked at are longer than the mean of all: 68.0 million sectors are asked for, and 61.7 on the GPU",
    ),
    (
        "512 Ki sparse rows of 1 to 150 of 1 Mi columns times a vector fp32, 32 rows by 4 lanes",
        (_ASKED, _READ, _BOTH),
        "the rows that were looked at are shorter than the mean of all, by 6%, and L1 has 28% of what they ask for, where the GPU's had 25%",
    ),
    (_BOXES, (_ASKED,), _IN_L1.format("89%", "88%")),
    (_BOXES, (_BOTH,), "what is read agrees; the GPU wrote 6.6 MB while it ran, which stay in L2 in the model"),
    (
        "clipped policy losses of 4096 sequences of 16 to 8192 tokens fp32, one program each",
        (_ASKED, _STORED, _READ, _BOTH),
        "the sequences of the programs that were looked at are shorter than the mean of all, by 6%; and what the first programs read from "
        "device memory is taken for what as many tokens of others do, which is a third too little",
    ),
    (
        "draws from 3000 rows of 32,003 weights fp32 by running sums",
        (_READ, _BOTH),
        "not known in part. A row is read twice, up to the number that is drawn the second time: the GPU reads 366 MB of these again from "
        "device memory, and the model 169",
    ),
    (
        "pages of 64 tokens int8 to 96 sequences of 50 to 4096 tokens bf16, 8 heads of 128 with scales",
        (_ASKED, _STORED),
        "the sequences of the programs that were looked at are shorter than the mean of all, by 7%",
    ),
    (
        "matmul 5000 x 4096 x 4096 fp16, bias and squared ReLU, descriptors, 132 programs, 128x128x64, 8 warps",
        (_STORED,),
        "of 5,000 rows the last tile has 8 of its 128, and the descriptor stores no others: of the tiles that were looked at none is such a one",
    ),
    (_EXPERTS, (_STORED,), "the programs that were looked at have more rows of their 64 to store than the mean of all"),
    (_EXPERTS, (_READ, _BOTH), _ONCE.format("452.8", "396.6")),
    ("products of 2 Mi pairs of 3 x 3 complex matrices fp32, 54 planes", (_ASKED,), _IN_L1.format("49%", "66%")),
    (
        "products of all pairs of 27 features of 64 fp16 for 96 Ki samples, rows of 415, 1 warp",
        (_STORED,),
        "of the stores of one warp that could meet in L1 on the way to L2, more reach it alone than the third that the model takes",
    ),
    ("31 taps of 768 channels and SiLU, 16 sequences of 1999 tokens fp16, tiles of 16 x 64", (_ASKED,), _IN_L1.format("94%", "95%")),
    ("a step of a flow of nine planes of 2400 x 3001 fp32, rows of 256 per program", (_ASKED,), _IN_L1.format("45%", "57%")),
    (
        "a step of a flow of nine planes of 2400 x 3001 fp32, rows of 256 per program",
        (_STORED,),
        "rows of 3,001 begin at any place of a sector, and those of the programs that were looked at touch fewer sectors than the mean",
    ),
    (
        "200 tracks of 480,001 samples fp16, 201 more at both ends by reflection, 4 warps",
        (_STORED,),
        "fewer of the stores that could meet their neighbor's reach L2 alone than the model takes",
    ),
    (
        "running sums of 40 rows of 500,001 fp32, one program each, 4096 at a time, 16 warps",
        (_STORED,),
        "more of the stores that could meet their neighbor's reach L2 alone than the fifth that the model takes after a barrier",
    ),
    # ---- the seventh set
    (_PREFIX, (_ASKED,), _LENGTHS_DIFFER.format("nine", "more", "1.07")),
    (
        _PREFIX,
        (_READ, _BOTH),
        "nine programs were looked at; today's model looks at more, and reads 53.3 of the 55.6 MB. The GPU wrote 10.6 MB more while it ran, "
        "which stay in L2 in the model",
    ),
    (
        "one token of 128 sequences of 200 to 4000, 64 heads of 128 share 8, cache of fp8",
        (_ASKED,),
        _LENGTHS_DIFFER.format("ten", "more", "0.98"),
    ),
    (
        "5 mixes of a token and the last one, 8 sequences of 2048 tokens of 2048 bf16, 8 warps",
        (_ASKED,),
        "not known in part. Of what loads asked for L1 had 91%, and 87% in the model: a token that the program before it on its SM has read, "
        "too, is still there more often",
    ),
    (
        "two of five fields of 16 Mi records fp32 from two others",
        (_READ, _BOTH),
        "two of the five numbers of each record are stored. To complete their sectors the model reads 18 million of them, and the GPU 10 "
        "million; the others were read for the two numbers that are loaded, and are there",
    ),
    (
        _PADDED,
        (_ASKED, _STORED, _READ, _WRITTEN, _BOTH),
        "half of the rows are padding, whose programs end at once, and neither of the two that were looked at is of such a row",
    ),
    (
        "16384 rows of up to 16384 fp16, summed up to the diagonal, 1024 at a time",
        (_READ, _BOTH),
        "what the first programs read was taken for what as many others do, and their rows are the shortest; it was fixed afterwards, and the "
        "ratio is 0.99",
    ),
    (
        "12 products fp16 of 100 to 3300 rows by 512 to 4096 columns, 132 programs, 128x128x32",
        (_READ, _WRITTEN, _BOTH),
        "not known in part: each operand is read once in the model, whose programs keep step. On the GPU 40.6 MB are read again, and of what "
        "is stored 24.6 MB more are written while it runs",
    ),
    (
        "matmul 4096 x 5120 x 3072 bf16 with the norm of its rows inside, 128x128x64, 4 warps",
        (_READ, _BOTH),
        "not known. It computes something else on a GPU, compiled by Triton 3.6, than in the interpreter; these are the counters of that",
    ),
    (
        "matmul 4096 x 8192 x 4096 fp8, descriptors, 128x256x128, stored in halves",
        (_READ, _BOTH),
        "not known in part: each operand is read once in the model, whose programs keep step, and 50.3 MB are as large as what L2 holds; the "
        "GPU reads 236 MB again",
    ),
    (
        "matmul 2048 x 4096 x 4096 fp8, tl.dot_scaled with scales of 32, 128x128x64, 8 warps",
        (_BOTH,),
        "what is read agrees; the GPU wrote 5.5 MB while it ran, which stay in L2 in the model",
    ),
    ("a step without a schedule, 20,000,003 fp32, 7 streams, 8 warps", (_STORED,), _ALONE.format("58%", "1/3", "")),
    (_BAGS.format("in any order"), (_ASKED,), _LENGTHS_DIFFER.format("55", "less", "0.90")),
    (_BAGS.format("in any order"), (_READ, _BOTH), _FIRST_ONES.format("are longer than others", "1.10")),
    (_BAGS.format("longest first"), (_READ, _BOTH), _FIRST_ONES.format("are the longest", "1.06")),
    (
        "bias, SiLU and a residual, 8192 x 7168 fp16, tiles of 16 x 256 by 264 programs, 3 stages, 8 warps",
        (_READ, _WRITTEN, _BOTH),
        _ONCE.format("234.9", "193.7"),
    ),
    (
        "runs of 16 Ki rows of 2048 int64 numbered, 2 warps",
        (_ASKED,),
        "not known in part: each row is loaded twice, one number apart. L1 has lost more of it in between than in the model",
    ),
    # ---- the sixth set
    (
        "q, k and v of 28, 4 and 4 heads of 128 apart, half of each turned, 32768 tokens bf16",
        (_ASKED,),
        "two loads in a row ask for each sector of cosines and sines, 18.9 M times in all, of which 13.7 M did not find it in L1: the 32 "
        "programs of an SM have 262 kB in use, as much as L1. In the model, in which the warps of a program load together, it is 8.8 M",
    ),
    (
        "embeddings and positions of 64 Ki tokens, 50,257 words of 1600 fp16, and their layer norm",
        (_ASKED,),
        _COLD.format("the 400 sectors of the norm's weights and biases", "0.05", "40", "1.31"),
    ),
    (
        "causal attention of 12 packed sequences of 100 to 4000 tokens, 16 heads of 128 bf16, 128x64",
        (_ASKED,),
        _LENGTHS.format("18.0", "23.6"),
    ),
    (
        "causal attention of 12 packed sequences of 100 to 4000 tokens, 16 heads of 128 bf16, 128x64",
        (_READ, _BOTH),
        _ONCE.format("287.2", "108.7"),
    ),
    (
        "causal attention of 12 packed sequences of 100 to 4000 tokens, 16 heads of 128 bf16, 128x64",
        (_WRITTEN,),
        "of the 95.7 MB that the kernel stores L2 keeps 7.1 when it ends, and 23.7 in the model",
    ),
    (
        "attention to 128 keys and a sink, 64 heads of 64 share 8, 16384 tokens fp16, 64x64",
        (_ASKED,),
        "one of the two programs looked at is at the beginning, where the loop has one block of keys; but for the first two of 256 "
        "programs it has three",
    ),
    (
        "attention to 128 keys and a sink, 64 heads of 64 share 8, 16384 tokens fp16, 64x64",
        (_READ, _BOTH),
        _ONCE.format("167.8", "138.4"),
    ),
    (
        "attention with scores below 50, 8 heads of 256, 4096 tokens bf16, 128x32",
        (_BOTH,),
        "6.2 MB of what it and others had stored are written back, and none in the model; what is read agrees within 4%",
    ),
    ("keys of 160 Ki tokens, 8 heads of 128 fp16, into pages in pieces of 8", (_READ, _BOTH), _PIECES),
    (
        "keys of 160 Ki tokens, 8 heads of 128 fp16, into pages in pieces of 8",
        (_WRITTEN,),
        "sectors of which one half came long before the other are written twice: 371.6 MB, of 335.5 that are stored. In the model all "
        "are filled in time, and 22.6 MB are left in L2",
    ),
    (
        "16384 x 12288 weights fp16 from two codebooks of 256 vectors of 8",
        (_ASKED,),
        _COLD.format("the 256 sectors of the codebooks", "0.03", "24", "2.08"),
    ),
    (
        "16384 rows of 4096 tokens by 32 experts of 2048 x 4096 fp8, scales of 128 x 128, 64x128x128",
        (_ASKED,),
        "of a program's 64 rows 44.5 are not masked off in the mean of the two that were looked at, and 60.5 in that of all; with 264 "
        "programs looked at the ratio is 0.98",
    ),
    (
        "16384 rows of 4096 tokens by 32 experts of 2048 x 4096 fp8, scales of 128 x 128, 64x128x128",
        (_READ, _BOTH),
        _NEW_ROWS,
    ),
    (
        "200 rows by 8192 x 8192 weights of 4 bits with zero points fp16, 64x64x64",
        (_ASKED,),
        "not known in part. A program asks for 1,036 sectors a turn besides those of x, where 304 are traced, and nearly none is found in "
        "L1: words and scales are copied past it (LDGSTS.BYPASS), and half of the lanes that copy words ask for what the others do. A turn's "
        "zero points are one sector, which 32 warp instructions copy by 4 bytes a lane; how often they ask for it is not known",
    ),
    (
        "200 rows by 8192 x 8192 weights of 4 bits with zero points fp16, 64x64x64",
        (_STORED,),
        "the last of four programs has 8 of its 64 rows, and neither of the two looked at is such a one. What is traced, times 200 / 256, is "
        "100% of what was measured",
    ),
    ("200 rows by 8192 x 8192 weights of 4 bits with zero points fp16, 64x64x64", (_READ, _BOTH), _WORD_BYTES),
    ("a Newton-Schulz step of 2048 x 5120 bf16, half of the first product, three launches", (_READ, _BOTH), _MUON),
    ("matmul 3000 x 2504 x 2008 bf16, 64x128x32, 4 warps, 1 stage", (_READ, _BOTH), _ONE_STAGE),
    (
        "matmul 3000 x 2504 x 2008 bf16, 32x64x64, 2 warps, 2 stages",
        (_ASKED,),
        "a row of an odd number begins within a sector, which the next turn asks for again: 25% of what loads asked for was found in L1, and "
        "20% in the model",
    ),
    ("matmul 3000 x 2504 x 2008 bf16, 32x64x64, 2 warps, 2 stages", (_READ,), _ALL.format("22.5", "101.2%", "the two programs that were looked at share less with their neighbors than others do")),
    (
        "matmul 3000 x 2504 x 6008 bf16, 128x256x32, 16 warps, 4 stages",
        (_ASKED,),
        "SASS loads three pairs of words that each thread has spilled in each of 188 turns, 17.3 M sectors, which the model counts once, as 0.1 M; "
        "and next to nothing is found in L1: of 43.1 M + 17.3 M sectors 59.6 M reached L2. The model has an L1 of 156 KiB, in which "
        "20% of the loads find their sector; a turn uses lines of 60 KiB, which 28 KiB would not hold",
    ),
    (
        "matmul 3000 x 2504 x 6008 bf16, 128x256x32, 16 warps, 4 stages",
        (_STORED,),
        _ALONE.format("80%", "1/5", ""),
    ),
    ("matmul 3000 x 2504 x 6008 bf16, 128x256x32, 16 warps, 4 stages", (_READ, _BOTH), _SIXTEEN_WARPS),
    (
        "two products 2048 x 4096 x 2048 fp16 and a gate, 128x128x32, 4 warps",
        (_ASKED, _STORED),
        _SPILLED_TWICE + "With them it is 92.3 and 68.7 M sectors, within 1% of what was measured",
    ),
    (
        "two products 2048 x 4096 x 2048 fp16 and a gate, 128x128x32, 4 warps",
        (_READ, _WRITTEN, _BOTH),
        _SPILLED_TWICE + "5% of these reach device memory: 119.4 MB were written, with the result of 16.8",
    ),
    (
        "AdamW of 40,000,001 fp32 masters, gradients fp16 with a scale, 8 streams",
        (_STORED,),
        _ALONE.format("57%", "1/3", ""),
    ),
    (
        "4 taps along 4093 tokens of packed sequences, 8 times 3072 channels fp16",
        (_STORED,),
        _ALONE.format("79%", "2/3", "; and a row looked at begins with a sector. With 33 programs looked at the ratio is 0.95"),
    ),
    (
        "x[:, 1:, 5:] of 300 x 301 x 1003 int8, tiles of 8 x 128",
        (_STORED,),
        _ALONE.format("47%", "2/3", "; and the last of eight tiles in a row has 102 of 128 columns. With 65 programs looked at the ratio is 1.10"),
    ),
    ("x[p[q]] of 8 Mi, all int64", (_READ, _BOTH), _BY_INDICES),
    ("two of 64 Mi bits for 8 Mi keys int64", (_READ, _WRITTEN, _BOTH), _BITS),
    (
        "means of 1500 sequences of 1 to 900 tokens of 768 bf16",
        (_ASKED,),
        "turns of a program: 31.5 in the two that were looked at, and 29.1 in all, which give the number that was measured",
    ),
    ("means of 1500 sequences of 1 to 900 tokens of 768 bf16", (_READ, _BOTH), _ONCE.format("1056.8", "593.0")),
    (
        "prefix sums of 4 Mi int64 by doubling, 22 launches",
        (_WRITTEN,),
        "of the 33.6 MB that a launch stores L2 keeps 20.9 in the mean when it ends, and 22.6 in the model",
    ),
    # ---- the fifth set
    (
        "matmul 8192 x 3072 x 4096 int8, two scales and a square, 128x64x128, 4 stages",
        (_READ, _BOTH),
        _NEAR_THE_SIZE_TOO.format("46.1", "read", "60%", "406.1", "read 277.2"),
    ),
    (_CHECKERS, (_BOTH,), _LEFT.format("100", "each of its nine launches stores", "25", "43")),
    (_FOURIER, (_BOTH,), _LEFT.format("33.6", "each of its eleven launches stores", "22.4", "29.0")),
    # ---- the fourth set
    (
        "causal attention with slopes, 32 heads of 128, 4096 tokens bf16, 128x64",
        (_READ,),
        _NEAR_THE_SIZE_TOO.format("269.8", "read", "60%", "336.9", "read 304.4"),
    ),
    (
        "32 planes of 1024 x 1024 fp32 warped, up to 8 pixels away",
        (_ASKED,),
        "the two programs that were looked at ask for 11% less than others do; with 65 programs looked at the ratio is 1.05",
    ),
    (
        "32 planes of 1024 x 1024 fp32 warped, up to 8 pixels away",
        (_READ, _BOTH),
        "planes and places have 142.6 MB, which the model reads once; the GPU read 17.8 MB of them twice, and kept 10.3 MB of its result, "
        "of which the model keeps 22.0",
    ),
    (
        "depthwise 7 x 7, 32 images of 56 x 56 x 128 fp16, channels last",
        (_BOTH,),
        _LEFT.format("25.7", "the kernel stores", "14.3", "22.6"),
    ),
    (
        "instance norm of 4096 planes of 100 x 100 fp32, three passes",
        (_READ, _BOTH),
        "of the 327.7 MB of the second and the third pass 31.6 were found in L1 and 29.1 in L2, and nothing in the model, in which all "
        "programs that run, whose planes have 63 MB, go on side by side",
    ),
    (
        "gradients of 32,000 embeddings of 2048, 64 Ki tokens in order bf16",
        (_READ,),
        _ONCE.format("268.4", "242.5"),
    ),
    # ---- the third set
    (
        "gated products, 2048 rows, 4096 to 4096 bf16",
        (_READ, _BOTH),
        _NEAR_THE_SIZE_TOO.format("84.9", "read", "60%", "134.2", "read 123.7"),
    ),
]  # fmt: skip
REASONS.update({(kernel, counter, "h200"): text for kernel, counters, text in _ON_H200 for counter in counters})
