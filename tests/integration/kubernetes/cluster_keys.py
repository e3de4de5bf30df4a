"""The certificate authority of the test cluster, the certificates that it signs, and
kubeconfigs."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterable
from pathlib import Path

import yaml


class ClusterKeys:
    """Keys in the directory `keys`, for a cluster whose API server is at the URL `server`."""

    def __init__(self, keys: Path, server: str) -> None:
        self._keys, self._server = keys, server

    def make(self, admin: Path, webhooks: Iterable[str]) -> None:
        """Make a CA as Kueue wants it (an RSA key in PKCS#1, the name kueue-ca), what it signs, and
        the kubeconfigs.

        `admin`: the path for that of the user who may do everything; `webhooks`: the controllers
        that have some.
        """
        ca = [str(self._keys / name) for name in ("ca.key", "ca.crt")]
        _run("openssl", "genrsa", "-traditional", "-out", ca[0], "2048")
        _run(
            *(
                "openssl",
                "req",
                "-x509",
                "-key",
                ca[0],
                "-days",
                "365",
                "-subj",
                "/CN=kueue-ca",
                "-out",
                ca[1],
            ),
            *(
                "-addext",
                "subjectAltName=DNS:kueue-ca",
                "-addext",
                "keyUsage=critical,keyCertSign,digitalSignature",
            ),
        )
        _run("openssl", "genrsa", "-out", str(self._keys / "accounts.key"), "2048")
        names = "IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
        self.certificate("apiserver", "kube-apiserver", names=names)
        services = ",".join(f"DNS:{name}-webhook-service.{name}-system.svc" for name in webhooks)
        self.certificate("webhook", "webhook", names=f"IP:127.0.0.1,{services}")
        self.certificate("kubelet-client", "kubelet-client", group="system:masters")
        self.certificate("admin", "admin", group="system:masters")
        self.kubeconfig("admin", admin)
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.certificate(name, f"system:{name}")
            self.kubeconfig(name, self._keys / f"{name}.kubeconfig")

    def certificate(self, file: str, subject: str, group: str = "", names: str = "") -> None:
        """Make FILE.key and FILE.crt of a subject, signed by the CA; `names`: its subject
        alternative names."""
        key, request, certificate = (
            str(self._keys / f"{file}.{end}") for end in ("key", "csr", "crt")
        )
        subject = (f"/O={group}" if group else "") + f"/CN={subject}"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        _run("openssl", "req", *curve, "-subj", subject, "-keyout", key, "-out", request)
        extensions = self._keys / f"{file}.ext"
        more = f"subjectAltName={names}\n" if names else ""
        extensions.write_text(f"extendedKeyUsage=serverAuth,clientAuth\n{more}")
        signer = [
            "-CA",
            str(self._keys / "ca.crt"),
            "-CAkey",
            str(self._keys / "ca.key"),
            "-CAcreateserial",
        ]
        more_arguments = ["-days", "365", "-extfile", str(extensions)]
        _run(
            "openssl", "x509", "-req", "-in", request, "-out", certificate, *signer, *more_arguments
        )

    def kubeconfig(self, name: str, path: Path) -> None:
        """Write the kubeconfig of the user NAME.crt to a path."""

        def data(file: str) -> str:
            return base64.b64encode((self._keys / file).read_bytes()).decode()

        server = {"server": self._server, "certificate-authority-data": data("ca.crt")}
        user = {
            "client-certificate-data": data(f"{name}.crt"),
            "client-key-data": data(f"{name}.key"),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(document))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)
