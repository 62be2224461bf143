"""A finished synthetic run, shared by the tests that only read it."""

import pytest

import synthetic


@pytest.fixture(scope='session')
def model_folder(tmp_path_factory):
  return synthetic.write_tokenizer(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='session')
def finished_run(tmp_path_factory, model_folder):
  return synthetic.write_run(tmp_path_factory.mktemp('run') / 'work', model_folder, updates=5, groups=4, size=3)
