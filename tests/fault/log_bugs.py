"""Seeded bugs of the writer of a gradient log."""

from __future__ import annotations

from typing import Any

from tierckpt.replay import checksum, log_writer


def seed_log_bug(name: str) -> None:
    """Write a log with one mistake from now on, which a test must find."""
    original, frames = log_writer.encode, list[Any]()

    def encode(frame: Any, *place: str) -> Any:
        frames.append((frame, place))
        [step] = frame.steps.values()
        if name == "a stale hyperparameter":
            [first] = frames[0][0].steps.values()
            step.hyperparameters[0]["lr"] = first.hyperparameters[0]["lr"]
        if name == "gradients cast":
            for gradient in step.gradients.values():
                gradient.copy_(gradient.bfloat16())
        if len(frames) == 5 and name == "a frame of another step":
            return original(frames[2][0], *frames[2][1])
        if len(frames) == 5 and name == "frames out of order":
            frames.append((frame, place))
            late = log_writer.Frame(frame.number + 1, frame.steps, frame.layouts, frame.attachment)
            return original(late, "f" * 32)
        head, views, digest = original(frame, *place)
        if len(frames) == 5 and name == "a missing frame":
            return b"", [], digest
        if len(frames) == 5 and name == "a byte of a gradient":
            views[0] = memoryview(bytes(views[0][:-1]) + bytes([views[0][-1] ^ 1]))
        return head, views, digest

    if name:
        log_writer.encode = encode
    if name in ("a stale hyperparameter", "gradients cast"):  # else the digest of the parameters finds it first
        checksum.frame_digest = lambda seen, others: ""
