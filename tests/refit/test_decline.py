"""A rank that cannot take part says why, and all hear it before anything begins."""

from __future__ import annotations

from tests.refit.sessions import error_of, run

from reshard.errors import BindingError


def test_a_rank_that_declines_fails_the_refit_everywhere_with_its_reason_until_it_accepts():
    def body(me, session):
        if not me.is_source:
            session.decline("its model cannot be read")
        me.train(1)
        error = error_of(lambda: session.refit(1))
        assert isinstance(error, BindingError)
        assert "engine rank 0 cannot take part: its model cannot be read" in str(error)
        assert me.is_source or me.is_poison()
        if not me.is_source:
            me.bring(session)
        session.refit(1)
        assert me.is_version(1)

    run({"trainer": 2, "engine": 1}, body)
