"""Publication: a new policy version reaches every replica, which drops its caches and acknowledges before it samples."""

from ts_jax.rollout.publication.probe import Probe, learner_probe
from ts_jax.rollout.publication.publisher import MODES, Published, Publisher

__all__ = ['MODES', 'Probe', 'Published', 'Publisher', 'learner_probe']
