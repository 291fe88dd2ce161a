"""Types of pools by the names that shapes for tests and benchmarks use."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
