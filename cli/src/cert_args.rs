//! The options that name a certificate, for all commands that have one.

use std::ffi::OsString;

use barewire::CertFiles;
use clap::Args;

/// A certificate in place of a key.
#[derive(Args, Clone)]
pub(crate) struct CertArgs {
    /// PEM file with the certificate that this side is known by, in place of a key, and then
    /// intermediates.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_CERT_FILE", hide_env = true)]
    cert: Option<OsString>,
    /// PEM file with the private key of the certificate.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_CERT_KEY_FILE", hide_env = true)]
    cert_key: Option<OsString>,
    /// PEM file with the roots that certificates of peers lead to.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_ROOTS_FILE", hide_env = true)]
    roots: Option<OsString>,
    /// Names in certificates of peers, separated by commas, such as spiffe://domain/job/*; all of
    /// this side's trust domain if not given.
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

    /// The files, if one is given: the domain says which lacks.
    pub(crate) fn files(&self) -> Option<CertFiles> {
        self.named().iter().any(|(_, value)| value.is_some()).then(|| {
            let [cert, key, roots] = [&self.cert, &self.cert_key, &self.roots]
                .map(|path| path.clone().unwrap_or_default());
            let (files, ids) = (CertFiles::new(cert, key, roots), self.peer_ids.as_ref());
            ids.iter().fold(files, |files, ids| {
                files.with_peers(ids.to_string_lossy().split(',').map(str::trim))
            })
        })
    }
}
