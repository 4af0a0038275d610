"""The gateway's own port with TLS."""

import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from app.gateway import Gateway
from app.settings import SettingsError

from .conftest import CHAT, make_settings, serving


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def files(folder: Path, authority: trustme.CA, name: str = "gateway") -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(key))
    return {"tls_cert_file": str(chain), "tls_key_file": str(key)}


async def test_port_speaks_tls(tmp_path: Path, authority: trustme.CA) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(server=files(tmp_path, authority)) as client:
        url = client.gateway.server.url
        assert url.startswith("https://")
        async with httpx.AsyncClient(base_url=url, verify=trusting) as http:
            headers = dict(client.http.headers)
            whole = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
            stream = await http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers)
        assert whole.status_code == stream.status_code == 200
        assert stream.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("what", ["missing", "no certificate", "of another certificate", "needs a password"])
def test_files_that_do_not_serve_are_told_in_one_line(tmp_path: Path, authority: trustme.CA, what: str) -> None:
    good, other = files(tmp_path, authority), files(tmp_path, authority, "other")
    if what == "missing":
        good["tls_key_file"] = str(tmp_path / "nowhere.key")
        message = r"server\.tls_key_file: .*nowhere\.key: No such file or directory"
    elif what == "no certificate":
        Path(good["tls_cert_file"]).write_text("nothing")
        message = r"server\.tls_cert_file and tls_key_file: "
    elif what == "of another certificate":
        good["tls_key_file"] = other["tls_key_file"]
        message = r"server\.tls_cert_file and tls_key_file: KEY_VALUES_MISMATCH"
    else:
        key = serialization.load_pem_private_key(Path(good["tls_key_file"]).read_bytes(), None)
        encryption = serialization.BestAvailableEncryption(b"secret")
        form = serialization.PrivateFormat.PKCS8
        Path(good["tls_key_file"]).write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
        message = r"server\.tls_cert_file and tls_key_file: "
    with pytest.raises(SettingsError, match=message) as caught:
        Gateway(make_settings(good))
    assert "\n" not in str(caught.value)
