//! The options that name a certificate, for all commands that have one.

use std::ffi::OsString;

use barewire::CertFiles;
use clap::Args;

use crate::fail::Fail;

/// A certificate in place of a key.
#[derive(Args, Clone, Default)]
pub(crate) struct CertArgs {
    /// PEM file with this side's certificate, followed by intermediates; instead of a pre-shared
    /// key.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_CERT_FILE", hide_env = true)]
    cert: Option<OsString>,
    /// PEM file with the private key of the certificate.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_CERT_KEY_FILE", hide_env = true)]
    cert_key: Option<OsString>,
    /// PEM file with the root certificates for peers.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_ROOTS_FILE", hide_env = true)]
    roots: Option<OsString>,
    /// Accepted names in peers' certificates, separated by commas, such as spiffe://domain/job/*;
    /// default: all names of this side's trust domain.
    #[arg(long, value_name = "IDS", env = "BAREWIRE_PEER_IDS", hide_env = true)]
    peer_ids: Option<OsString>,
}

impl CertArgs {
    /// The options that are given, and their values.
    pub(crate) fn named(&self) -> [(&'static str, &Option<OsString>); 4] {
        [
            ("--cert", &self.cert),
            ("--cert-key", &self.cert_key),
            ("--roots", &self.roots),
            ("--peer-ids", &self.peer_ids),
        ]
    }

    /// The files, if one is given.
    ///
    /// # Errors
    /// One lacks.
    pub(crate) fn files(&self) -> Result<Option<CertFiles>, Fail> {
        if self.named().iter().all(|(_, value)| value.is_none()) {
            return Ok(None);
        }
        let file = |(name, value): &(&'static str, &Option<OsString>)| {
            let lacks = format!("{name} is missing: a certificate, its key and roots go together");
            (*value).clone().ok_or_else(|| Fail::usage(lacks))
        };
        let [cert, key, roots, _] = &self.named();
        let files = CertFiles::new(file(cert)?, file(key)?, file(roots)?);
        Ok(Some(self.peer_ids.iter().fold(files, |files, ids| {
            files.with_peers(ids.to_string_lossy().split(',').map(str::trim))
        })))
    }
}
