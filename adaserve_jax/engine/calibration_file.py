"""Keeps what was learned of acceptance on disk, so that a restart goes on from it. Imports no jax."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from adaserve_jax.config import EngineConfig
from adaserve_jax.scheduler.calibration import Calibrator
from adaserve_jax.tree.chances import write_chances

SAVE_EVERY_S = 180.0
_log = logging.getLogger(__name__)


class CalibrationFile:
    """Writes a calibrator's table. A file that cannot be written is logged, and serving goes on."""

    def __init__(self, path: Path, calibrator: Calibrator, clock: Callable[[], float] = time.monotonic):
        self._path = path
        self._calibrator = calibrator
        self._clock = clock
        self._saved_s = clock()

    @classmethod
    def of(cls, config: EngineConfig, calibrator: Calibrator | None) -> CalibrationFile | None:
        """None when nothing is learned, or there is no place for it."""
        if config.calibration is None or calibrator is None or not config.calibrate:
            return None
        return cls(Path(config.calibration), calibrator)

    def save_if_due(self) -> None:
        """Write when SAVE_EVERY_S have passed since the last time."""
        if self._clock() - self._saved_s >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Take in what was observed, and write."""
        self._calibrator.take_in()
        try:
            write_chances(self._path, self._calibrator.table)
        except OSError as error:
            _log.error("what was learned of acceptance could not be written to %s: %s", self._path, error)
        self._saved_s = self._clock()
