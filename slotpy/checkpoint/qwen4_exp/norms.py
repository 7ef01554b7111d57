"""The norm convention of a checkpoint: zero-centred weights are stored as they are, or with the one already added.

Conversions do either, and nothing in the files says which; the values do.
"""

import numpy as np

from slotpy.checkpoint.checkpoint import Checkpoint
from slotpy.errors import CheckpointError


def norm_offset(checkpoint: Checkpoint) -> float:
    """Give what must be added to the stored weights of zero-centred norms: 1, or 0 where it is in them already.

    Looks at the middle one of the averages of all hyper-connection norms in the layers. A single norm can mislead:
    training moved the final mixer's in our own demo model to an average of 1.2.

    Raises CheckpointError where the norms follow neither convention.
    """
    names = [
        tensor.parts["weight"]
        for module, tensor in checkpoint.resident.items()
        if module.startswith("layers.") and module.endswith("hc_norm")
    ]
    middle = float(np.median([checkpoint.index.read_array(name).mean() for name in names]))
    if not -0.5 < middle < 1.5:
        raise CheckpointError(
            "the norms are neither zero-centred nor around 1",
            file=checkpoint.directory,
            tensor="layers.*.hc_norm",
            expected="averages of about 0 or about 1",
            found=f"{middle:.3f} in the middle",
        )
    return 0.0 if middle > 0.5 else 1.0
