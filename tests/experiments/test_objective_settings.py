"""Settings of the objective: what they make, and what does not go together."""

import pytest

from configs import defaults
from experiments import engines, learner
from ts_jax import types
from ts_jax.objectives import distillation, policy_gradient
from ts_jax.objectives.terms import Terms


def made(**settings):
  config = defaults.get_config()
  config.objective.update(settings)
  return learner.objective(config)


def test_the_defaults_are_grpo_alone():
  assert made() == policy_gradient.PolicyGradient(constant=16384)


@pytest.mark.parametrize('settings, fields', [
    (dict(name='reinforce', baseline='batch'), dict(estimator='mean', aggregation='trajectory', baseline='batch')),
    (dict(name='rloo', estimator='leave_one_out_std', advantage_clip=2.0), dict(estimator='leave_one_out_std', advantage_clip=2.0)),
    (dict(importance_cap=2.0, kl=0.1, kl_estimator='k2', entropy=0.01), dict(terms=Terms(2.0, 0.1, 'k2', 0.01)))], ids=str)
def test_settings_become_an_objective(settings, fields):
  objective = made(**settings)
  assert {name: getattr(objective, name) for name in fields} == fields


def test_distillation_takes_terms():
  assert made(name='opd', entropy=0.5) == distillation.Distillation(Terms(entropy=0.5))


@pytest.mark.parametrize('settings, told', [
    (dict(estimator='median'), "estimator 'median' is unknown"),
    (dict(baseline='token'), "baseline 'token' is unknown"),
    (dict(advantage_clip=-1.0), 'advantage_clip=-1.0'),
    (dict(importance_cap=-1.0), 'importance_cap=-1.0'),
    (dict(kl_estimator='k4'), "kl_estimator 'k4'"),
    (dict(entropy=-0.1), 'entropy=-0.1'),
    (dict(estimator='leave_one_out_std'), 'set config.objective.advantage_clip, or epsilon to at least 0.01'),
    (dict(name='opd', baseline='batch'), "unset config.objective.baseline='batch'"),
    (dict(name='opd', aggregation='sequence'), "unset config.objective.aggregation='sequence'"),
    (dict(name='opd', advantage_clip=1.0), 'unset config.objective.advantage_clip=1.0')], ids=str)
def test_what_does_not_go_together_is_refused(settings, told):
  with pytest.raises(types.ConfigError, match=told):
    made(**settings)


def test_small_groups_are_refused_where_others_are_compared_with():
  config = defaults.get_config()
  config.batch.update(dict(group_size=2, prompts=8))
  config.objective.update(dict(name='rloo', estimator='leave_one_out_std', epsilon=0.1))
  with pytest.raises(types.ConfigError, match='at least 3 rewards, a group has 2: raise config.batch.group_size'):
    learner.objective(config)
  config.objective.baseline = 'batch'
  assert learner.objective(config).needs_batch


def test_a_reference_at_another_temperature_is_refused():
  config = defaults.get_config()
  config.objective.kl, config.agent.temperature = 0.1, 0.7
  with pytest.raises(types.ConfigError, match='config.agent.temperature=1 .it is 0.7'):
    learner.objective(config)


def test_sums_for_rewards_are_a_setting():
  config = defaults.get_config()
  config.objective.max_distinct_rewards = 7
  assert learner.policy(config).reward_sums == 7
  config.objective.max_distinct_rewards = 0
  with pytest.raises(types.ConfigError, match='max_distinct_rewards=0'):
    learner.policy(config)


def test_only_a_kl_has_a_reference_which_is_the_initial_student(tiny_student):
  from experiments import wiring
  config = defaults.get_config()
  config.model.source = str(tiny_student)
  config.agent.max_context_tokens = 256
  student = wiring.load_student(config)
  assert engines.load_teacher(config, student, (0,), (0,), 'reference') is None
  config.objective.kl = 0.1
  found = engines.load_teacher(config, student, (0,), (0,), 'reference')
  assert found.folder == student.folder and engines.load_teacher(config, student, (0,), (0,)) is None
  config.agent.max_context_tokens = 131072
  with pytest.raises(types.ConfigError, match='the reference .* has a context of'):
    engines.load_teacher(config, student, (0,), (0,), 'reference')
