"""Writes the report of a run: one self-contained HTML page.

    python -m experiments.report --workdir=RUN [--beside=RUN,RUN]
"""

from absl import flags

from experiments import cli
from ts_jax.telemetry import report
from ts_jax.telemetry import rundir
from ts_jax.telemetry.report import collect

_WORKDIR = flags.DEFINE_string('workdir', None, 'Work folder of the run.', required=True)
_OUTPUT = flags.DEFINE_string('output', None, 'HTML file to write.  Default: report.html in the work folder.')
_MAX_TRAJECTORIES = flags.DEFINE_integer('max_trajectories', collect.Caps.trajectories, 'Most trajectories the page carries.', lower_bound=1)

_BESIDE = flags.DEFINE_list('beside', [], "Other runs, whose timelines stand under this one's on one time axis.")


def main() -> None:
  path = report.build_report(rundir.RunDirectory(_WORKDIR.value), _OUTPUT.value, collect.Caps(trajectories=_MAX_TRAJECTORIES.value),
                             [rundir.RunDirectory(folder) for folder in _BESIDE.value])
  print(f'{path.resolve()} ({path.stat().st_size / 2**20:.1f} MiB)')


if __name__ == '__main__':
  cli.run(main)
