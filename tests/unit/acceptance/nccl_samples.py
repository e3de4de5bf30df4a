"""Output of nccl-tests, written out row by row as the program prints it."""

from __future__ import annotations

from drillyard.hardware.bandwidths import MIB, bus_factor

TYPE_BYTES = 4
PER_RANK = {
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "alltoallv",
    "hypercube",
}
REDUCES = {"all_reduce", "reduce_scatter", "reduce", "sendrecv"}
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
UNCHECKED_IN_PLACE = {"alltoall", "alltoallv", "sendrecv"}

NAMES = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong"
)
HEADER = [
    "#",
    "#                                                              out-of-place"
    "                       in-place          ",
    NAMES,
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"
    "            (us)  (GB/s)  (GB/s)       ",
]

# A published all_gather of 16 B200s on two nodes: bytes, then time (us), algbw and busbw (GB/s) out
# of place and in place.
A4 = """\
1024        43.34   0.02   0.02   42.48   0.02   0.02
2048        42.80   0.05   0.04   42.42   0.05   0.05
4096        43.10   0.10   0.09   42.85   0.10   0.09
8192        44.48   0.18   0.17   44.14   0.19   0.17
16384       46.17   0.35   0.33   45.51   0.36   0.34
32768       47.93   0.68   0.64   47.57   0.69   0.65
65536       48.31   1.36   1.27   48.15   1.36   1.28
131072      50.06   2.62   2.45   50.38   2.60   2.44
262144      50.99   5.14   4.82   52.18   5.02   4.71
524288      54.63   9.60   9.00   55.29   9.48   8.89
1048576     63.77  16.44  15.41   63.85  16.42  15.40
2097152     84.46  24.83  23.28   79.28  26.45  24.80
4194304     94.15  44.55  41.77   94.28  44.49  41.71
8388608     107.9  77.76  72.90   107.1  78.35  73.46
16777216    140.4 119.46 111.99   137.4 122.13 114.50
33554432    152.6 219.83 206.09   154.7 216.88 203.33
67108864    236.2 284.13 266.37   234.7 285.96 268.09
134217728   415.7 322.90 302.72   411.0 326.59 306.18
268435456   742.9 361.35 338.77   762.0 352.27 330.25
536870912  1412.5 380.09 356.34  1403.5 382.53 358.62
1073741824 2767.0 388.05 363.80  2749.2 390.57 366.16
2147483648 5429.5 395.52 370.80  5413.8 396.67 371.87
4294967296  10757 399.29 374.33   10736 400.06 375.05
8589934592  21395 401.49 376.40   21381 401.75 376.64
"""
A4_MEAN = "135.094"

# Published busbw of all_gather on two A3 Mega nodes by MiB.
A3_MEGA = {
    1: 7.3, 4: 26.5, 16: 79.5, 64: 121.5, 128: 156, 256: 166.6, 512: 174.8, 1024: 182.0,
    2048: 186.1, 4096: 187.9, 8192: 188.7,
}  # fmt: skip

# Published all_reduce of 16 H100s on two nodes, 1 GB being 1000 MiB.
H100_PAGE = """\
# Acceptance of a cluster

| Test | Metric | Threshold | Observed | Status |
|------|--------|-----------|----------|--------|
| NCCL AllReduce (InfiniBand) | GB/s | > 350 | 434.99 | PASS |

#### NCCL AllReduce Bandwidth (16 GPUs across 2 nodes via InfiniBand)

| Message Size | Bandwidth | Latency |
|--------------|-----------|---------|
| 1 MB | 22.30 GB/s | 0.088 ms |
| 10 MB | 124.92 GB/s | 0.157 ms |
| 100 MB | 304.03 GB/s | 0.647 ms |
| 1 GB | 434.99 GB/s | 4.520 ms |

| Metric | 8 GPUs (1 node) | 16 GPUs (2 nodes) | Efficiency |
|--------|-----------------|-------------------|------------|
| NCCL Bandwidth | 442.21 GB/s | 434.99 GB/s | 98% |
"""


def number(value: float, width: int) -> str:
    """As getFloatStr of nccl-tests prints it."""
    digits = len(str(int(value))) if value >= 1 else 0
    decimals = 2 if digits < width - 2 else 1 if digits < width - 1 else 0
    return f"{value:{width}.{decimals}f}"


def line(collective, ranks, size, out, into, wrong="0", wrong_in_place=None):
    """A row; `out` and `into` are (time, algbw, busbw) as text."""
    count = size // TYPE_BYTES // (ranks if collective in PER_RANK else 1)
    operation = "sum" if collective in REDUCES else "none"
    root = 0 if collective in ROOTED else -1
    if wrong_in_place is None:
        wrong_in_place = "N/A" if collective in UNCHECKED_IN_PLACE else wrong
    return (
        f"{size:12d}  {count:12d}  {'float':>8}  {operation:>6}  {root:6d}"
        f"  {out[0]:>7}  {out[1]:>6}  {out[2]:>6}  {wrong:>6}"
        f"  {into[0]:>7}  {into[1]:>6}  {into[2]:>6}  {wrong_in_place:>6}"
    )


def figures(collective, ranks, size, microseconds):
    """(time, algbw, busbw) as text."""
    moved = size * (ranks - 1) / ranks if collective == "hypercube" else size
    alg = moved / microseconds / 1e3
    return (
        number(microseconds, 7),
        number(alg, 6),
        number(alg * bus_factor(collective, ranks), 6),
    )


def finish(rows, mean, program=None, wrong=0):
    """The table with the lines around it."""
    return "\n".join(
        [
            *([f"# Collective test starting: {program}"] if program else []),
            *HEADER,
            *rows,
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# Avg bus bandwidth    : {mean} ",
            "#",
            *([f"# Collective test concluded: {program}", "#"] if program else []),
            "",
        ]
    )


def output(collective, ranks, bus_by_mib, *, slower=1.0, named=False, **changes):
    """A program's output with this busbw by size, every time multiplied by `slower`."""
    rows, buses = [], []
    factor = bus_factor(collective, ranks)
    for mib, bus in bus_by_mib.items():
        size = int(mib * MIB)
        moved = size * (ranks - 1) / ranks if collective == "hypercube" else size
        found = figures(collective, ranks, size, moved * factor / bus / 1e3 * slower)
        rows.append(line(collective, ranks, size, found, found, **changes))
        buses.append(float(found[2]))
    mean = f"{sum(buses) / len(buses):g}"
    return finish(rows, mean, f"{collective}_perf" if named else None)


def a4_output(slower=1.0):
    """The published table of A4; with other times all figures follow from them."""
    rows, buses = [], []
    for text in A4.splitlines():
        size, *words = text.split()
        halves = [tuple(words[:3]), tuple(words[3:])]
        if slower != 1.0:
            halves = [
                figures("all_gather", 16, int(size), float(half[0]) * slower) for half in halves
            ]
        rows.append(line("all_gather", 16, int(size), *halves))
        buses += [float(half[2]) for half in halves]
    mean = A4_MEAN if slower == 1.0 else f"{sum(buses) / len(buses):g}"
    return finish(rows, mean)


def h100_page(slower=1.0):
    """The published page; with other times the bandwidths follow."""
    if slower == 1.0:
        return H100_PAGE
    text = H100_PAGE
    for bus, milliseconds in (
        ("22.30", "0.088"), ("124.92", "0.157"), ("304.03", "0.647"), ("434.99", "4.520"),
    ):  # fmt: skip
        text = text.replace(
            f"| {bus} GB/s | {milliseconds} ms |",
            f"| {float(bus) / slower:.2f} GB/s | {float(milliseconds) * slower:.3f} ms |",
        )
    return text
