"""The wheel contract."""


def test_wheels_exist(pytestconfig):
    assert list(pytestconfig.getoption("--dist").glob("*.whl"))
