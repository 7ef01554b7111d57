"""Rewrite a checkpoint so that every routed expert and every n-gram row is one aligned, contiguous read.

Owns the order of the steps. What is written is decided in pack_plan.py, how it survives interruptions in writing.py,
how it is opened again in manifest.py. The source is only read.

While a pack is written it has a journal; the manifest appears, complete, when all else is done.
"""

import json
from pathlib import Path

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.checkpoint.index import resolve_directory
from slotpy.checkpoint.manifest import (
    FORMAT_VERSION,
    JOURNAL_NAME,
    MANIFEST_NAME,
    PackManifest,
    load_pack,
    verify_pack,
)
from slotpy.checkpoint.pack_plan import PackPlan, plan_pack
from slotpy.checkpoint.writing import (
    Journal,
    Progress,
    refuse_foreign,
    refuse_full_disk,
    refuse_other_source,
    refuse_overlap,
    replace_durably,
    write_outputs,
    writing,
)
from slotpy.errors import UsageError

_COMMAND = "pack"


def pack(checkpoint: Checkpoint, out: Path, *, progress: Progress = lambda name, done, total: None) -> PackManifest:
    """Write the packed form of `checkpoint` to the directory `out`, or finish what an earlier call began there.

    Bytes of an earlier call are hashed again, not trusted; on a finished pack that is all that happens. Memory use is
    bounded by a few blocks. May be killed at any time.

    Raises: UsageError for an `out` that must not be written to; CheckpointError when an earlier call packed another
    state of the source, or for a finished pack that is damaged; CapacityError when the disk is too small; ReadError
    when the source cannot be read or changes meanwhile; SlotpyError when `out` cannot be written.
    """
    if checkpoint.packed:
        raise UsageError(f"{checkpoint.directory} is packed already.")
    out = out.resolve()
    refuse_overlap(resolve_directory(checkpoint.directory), out)
    plan = plan_pack(checkpoint)
    with writing(out):
        if (out / MANIFEST_NAME).exists():
            return _check_finished(out, plan, progress)
        refuse_foreign(out, JOURNAL_NAME)
        refuse_full_disk(out, plan.outputs)
        out.mkdir(parents=True, exist_ok=True)
        with Journal(out / JOURNAL_NAME, _COMMAND) as journal:
            if not (out / MANIFEST_NAME).exists():  # else another call finished while this one came to its lock
                _write_pack(checkpoint, out, plan, journal, progress)
            journal.remove()
    return load_pack(out)


def _check_finished(out: Path, plan: PackPlan, progress: Progress) -> PackManifest:
    manifest = load_pack(out)
    refuse_other_source(out, manifest.source, plan.source, _COMMAND)
    verify_pack(out, progress=progress)
    (out / JOURNAL_NAME).unlink(missing_ok=True)
    return manifest


def _write_pack(checkpoint: Checkpoint, out: Path, plan: PackPlan, journal: Journal, progress: Progress) -> None:
    records = {kind: records.to_json() for kind, records in plan.records.items()}
    journal.begin(plan.source, {"format_version": FORMAT_VERSION, "records": records}, plan.outputs)
    manifest = PackManifest(
        directory=out,
        layout=checkpoint.layout,
        row_scale=checkpoint.row_scale,
        source=plan.source,
        records=plan.records,
        files=write_outputs(out, plan.outputs, journal, progress),
        left_out=plan.left_out,
    )
    replace_durably(out / MANIFEST_NAME, json.dumps(manifest.to_json(), indent=1).encode() + b"\n")
