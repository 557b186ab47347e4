//! Addresses as people write them.

use barewire_dataplane::types::EpAddr;

use crate::errno::{Error, Result};

/// The address that `node` and `service` name: a whole address such as
/// `barewire://02:00:00:00:00:01/7` and no service, or a MAC and the number of an endpoint (0
/// without a service).
///
/// # Errors
/// [`Error::Invalid`]: they name none.
pub fn resolve(node: &str, service: Option<&str>) -> Result<EpAddr> {
    match service {
        None if node.contains('/') => node.parse(),
        None => format!("{node}/0").parse(),
        Some(_) if node.contains('/') => {
            Err(Error::Invalid("service: the node is a whole address already"))
        }
        Some(service) => format!("{node}/{service}").parse(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_and_service_name_an_address() {
        let text = "barewire://02:00:00:00:00:01/7";
        let addr = resolve(text, None).unwrap();
        assert_eq!((addr.ep, addr.incarnation), (7, 0));
        assert_eq!(resolve("02:00:00:00:00:01", Some("7")), Ok(addr));
        assert_eq!(resolve("02:00:00:00:00:01", None).map(|a| a.ep), Ok(0));
        assert_eq!(addr.to_string(), text);
        let bad = [
            (text, Some("7")),
            ("", None),
            ("host", Some("1")),
            ("02:00:00:00:00:01", Some("65536")),
            ("01:00:00:00:00:01", Some("1")),
        ];
        for (node, service) in bad {
            let e = resolve(node, service).unwrap_err();
            assert_eq!(e.fi_errno(), 22, "{node} {service:?}");
        }
    }
}
