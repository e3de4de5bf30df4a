"""The published log of the worked example, and what its page says beside it."""

from __future__ import annotations

from drillyard.measurement.user_facts import UserFacts

# The log published with a tutorial on fine-tuning Llama-3.1-70B on 16 B200s of GKE with DWS
# (2025-09-09): the facts of its lines, and its launcher's prefix.
PUBLISHED = (
    ("16:10:48.625736211", 1, 27.02, 513.3, 1213, 1.3697),
    ("16:11:03.741677921", 2, 15.12, 917.7, 2168, 1.3077),
    ("16:11:19.025340931", 3, 15.28, 907.6, 2144, 1.1527),
    ("16:11:33.552950048", 4, 14.53, 954.9, 2256, 0.9699),
    ("16:11:48.093697184", 5, 14.54, 954.0, 2254, 0.6620),
    ("16:12:02.639682457", 6, 14.55, 953.7, 2253, 0.6007),
    ("16:12:17.163969264", 7, 14.52, 955.1, 2256, 0.5132),
    ("16:12:31.728377069", 8, 14.56, 952.4, 2250, 0.5110),
    ("16:12:46.268846051", 9, 14.54, 954.0, 2254, 0.4839),
    ("16:13:00.804060769", 10, 14.53, 954.4, 2254, 0.4395),
)
EXAMPLE = UserFacts(
    accelerator="b200",
    num_gpus=16,
    params=70_550_000_000,
    batch_size_per_gpu=8,
    sequence_length=4096,
    price_per_gpu_hour=8.05,
)


def published_log(prefix: str = "INFO 2025-09-09T{}Z [resource.labels.containerName: job] ") -> str:
    """The published lines behind gcloud's prefix."""
    lines = [("16:10:21.376110182", "[PerfLogger] Using 70.55B parameters for TFLOPs calculation.")]
    for time, step, seconds, tflops, tokens, loss in PUBLISHED:
        rates = f"TFLOPs/s/GPU: {tflops} | Tokens/s/GPU: {tokens} | Loss: {loss:.4f}"
        lines.append((time, f"Step: {step} | Time: {seconds:.2f}s | {rates}"))
    return "".join(f"{prefix.format(time)}{text}\n" for time, text in lines)
