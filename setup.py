"""Packaging of ts_jax.  Ranges are the ones the test suite was run with; see BUILD_NOTES.md."""

import setuptools

LEARNER = [
    'absl-py>=2.1,<3',
    'aiohttp>=3.10,<4',
    'chex>=0.1.88,<0.2',
    'flax>=0.12,<0.13',
    'gguf>=0.17,<0.20',
    'httpx>=0.27,<1',
    'huggingface-hub>=0.30,<3',
    'jax>=0.10.0,<0.11',
    'jinja2>=3.1,<4',
    'matplotlib>=3.9,<4',
    'ml-collections>=1.0,<2',
    'ml-dtypes>=0.5,<0.7',
    'numpy>=2.0,<3',
    'optax>=0.2.5,<0.3',
    'orbax-checkpoint>=0.11,<0.13',
    'tensorboardX>=2.6,<3',
    'tokenizers>=0.22,<0.24',
]
TEST = [
    'hypothesis>=6.100,<7',
    'ipykernel>=7,<8',
    'nbclient>=0.10,<0.12',
    'nbformat>=5.10,<6',
    'psutil>=6,<8',
    'pytest>=8.3,<10',
    'pytest-timeout>=2.3,<3',
    'pytest-xdist>=3.6,<4',
    'safetensors>=0.5,<0.9',
]

setuptools.setup(
    name='ts_jax',
    version='0.1.0',
    description='Agentic RL post-training in JAX: streamed gradients, zero policy staleness, no idle learner.',
    python_requires='>=3.11,<3.14',
    package_data={'ts_jax.telemetry.report': ['assets/*']},
    packages=setuptools.find_packages(include=['ts_jax', 'ts_jax.*']),
    install_requires=LEARNER,
    extras_require={'test': TEST, 'gpu': ['jax[cuda12]>=0.10.0,<0.11']},
)
