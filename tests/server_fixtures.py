"""Fixtures: servers, one of each per session, and environment variables that point to them."""

import pytest

from tests.storage.servers import s3_server, web_server


@pytest.fixture(scope="session")
def obstore():
    """The library for remote storage; skips the test if it is not installed."""
    return pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")


@pytest.fixture(scope="session")
def s3(obstore, tmp_path_factory):
    """An S3 endpoint; environment variables contain its address and credentials, as for a user."""
    pytest.importorskip("moto", reason="moto, whose server speaks S3, is not installed")
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture(scope="session")
def web(tmp_path_factory):
    """A third-party web server."""
    with web_server(tmp_path_factory.mktemp("web")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield server
