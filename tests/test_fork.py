"""Processes that fork: before CUDA is used all is well, afterwards an error says to spawn."""

from __future__ import annotations

from pathlib import Path

from installation import Installation


def test_forked_child_says_to_spawn(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, sys, cuops, numpy
        from cuops import _backend
        x = numpy.ones((2, 8), "float32")
        calls = [
            lambda: cuops.rms_norm(x),
            lambda: _backend.library().kron_linear_fibers_bwd_plan(0, 64, [8, 8, 8, 8, 8, 8], 1, 0),  # which is known by then
        ]
        for call in calls:
            call()
        child = os.fork()
        if child == 0:
            for call in calls:
                try:
                    call()
                    os._exit(2)
                except cuops.errors.CudaError as error:
                    if '"spawn"' not in str(error) or "forked" not in str(error):
                        os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        cuops.rms_norm(x)
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


def test_fork_before_cuda_is_used_is_fine(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, cuops, numpy
        x = numpy.ones((2, 8), "float32")
        child = os.fork()
        numpy.testing.assert_allclose(cuops.rms_norm(x), x, rtol=1e-5)
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


def test_array_of_the_library_outlives_a_fork(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, sys, cuops
        from cuops import _backend
        array = _backend.library().empty([4, 4], "float32", 0)
        child = os.fork()
        del array
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr
