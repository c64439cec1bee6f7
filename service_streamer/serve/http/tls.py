"""TLS of the server: the certificates, which are read again when their files change.

Each new connection gets the newest context. Open connections keep theirs, so a renewal drops none.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from .file_stamps import Stamp, stamp_of
from .web_options import WebOptions

logger = logging.getLogger(__name__)

#: Seconds for a handshake.
HANDSHAKE = 10.0

#: The environment variable with the password of the key's file. Lists of processes show options.
PASSWORD = "SERVICE_STREAMER_SSL_KEYFILE_PASSWORD"


class TLS:
    """Makes the contexts of connections. Belongs to one thread.

    Attributes:
        context: for a new connection.

    Args:
        certfile: PEM file with the certificate and its chain.
        keyfile: PEM file with its key; None if the key is in ``certfile``.
        ca_certs: PEM file of the authorities that clients' certificates must be from; None to ask
            clients for no certificate.
        password: of the key's file; empty for none.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not what it should be; says which, and what to do.
    """

    def __init__(
        self,
        certfile: Path,
        keyfile: Path | None = None,
        ca_certs: Path | None = None,
        password: str = "",
    ) -> None:
        self._files = certfile, keyfile, ca_certs
        self._password = password
        self._stamp = stamp_of(*self._files)
        self.context = self._made()

    @classmethod
    def of(cls, options: WebOptions) -> TLS | None:
        """Those of the command line; None without a certificate. Raises as the constructor."""
        if options.ssl_certfile is None:
            return None
        return cls(
            options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs,
            os.environ.get(PASSWORD, ""),
        )  # fmt: skip

    def look(self) -> None:
        """Read the files if they have changed. Logs what is wrong with them."""
        stamp: Stamp = ()
        try:
            stamp = stamp_of(*self._files)
            if stamp == self._stamp:
                return
            self.context = self._made()
        except (OSError, ValueError) as error:
            if stamp != self._stamp:  # once for each change
                logger.error("%s; new connections get the certificate that was read last", error)
        else:
            logger.info("--ssl-certfile %s has changed and was read again", self._files[0])
        self._stamp = stamp

    def _made(self) -> ssl.SSLContext:
        certfile, keyfile, ca_certs = self._files
        for path in self._files:
            if path is not None:
                path.open("rb").close()  # an error here names the file, and those of ssl do not
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        is_encrypted = False

        def password() -> str:
            nonlocal is_encrypted
            is_encrypted = True
            return self._password

        try:
            context.load_cert_chain(certfile, keyfile, password)
        except ssl.SSLError as error:
            raise ValueError(self._problem(error, is_encrypted=is_encrypted)) from None
        if ca_certs is not None:
            try:
                context.load_verify_locations(ca_certs)
            except ssl.SSLError:
                raise ValueError(
                    f"--ssl-ca-certs {ca_certs} has no certificate in PEM form"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _problem(self, error: ssl.SSLError, *, is_encrypted: bool) -> str:
        certfile, keyfile, _ = self._files
        place = f"--ssl-keyfile {keyfile}" if keyfile is not None else f"--ssl-certfile {certfile}"
        if is_encrypted and not self._password:
            return f"the key in {place} is encrypted; set its password in {PASSWORD}"
        if is_encrypted:
            return f"the key in {place} cannot be decrypted; {PASSWORD} may be wrong"
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {place} does not belong to the certificate in {certfile}"
        return (
            f"--ssl-certfile {certfile} and its key"
            f"{'' if keyfile is None else f' in {keyfile}'} cannot be used "
            f"({error.reason or error}); they must be a certificate with its chain, and its key, "
            "in PEM form"
        )
