//! Passes the log of the layers below to libfabric's log, which `FI_LOG_LEVEL` and the like filter.

use std::fmt::{Debug, Write};
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::host;

/// Starts to pass on log lines. `fi_getinfo` calls it first: nothing logs before.
pub(crate) fn start() {
    static ONCE: Once = Once::new();
    // The subscriber is that of this library alone: a program with the Rust crate has its own.
    ONCE.call_once(|| drop(tracing::subscriber::set_global_default(HostLog)));
}

struct HostLog;

/// libfabric's `enum fi_log_level`.
fn level_of(metadata: &Metadata<'_>) -> i32 {
    match *metadata.level() {
        Level::ERROR | Level::WARN => 0,
        Level::INFO => 2,
        Level::DEBUG | Level::TRACE => 3,
    }
}

impl Subscriber for HostLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && host::logs(level_of(metadata))
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        host::log(level_of(event.metadata()), &line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message, then the other fields as `name=value`.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let gap = if self.0.is_empty() { "" } else { " " };
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{gap}{value:?}"),
            name => write!(self.0, "{gap}{name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line() {
        struct LogCapture(std::sync::Arc<std::sync::Mutex<String>>);

        impl Subscriber for LogCapture {
            fn enabled(&self, _: &Metadata<'_>) -> bool {
                true
            }

            fn new_span(&self, _: &Attributes<'_>) -> Id {
                Id::from_u64(1)
            }

            fn record(&self, _: &Id, _: &Record<'_>) {}

            fn record_follows_from(&self, _: &Id, _: &Id) {}

            fn event(&self, event: &Event<'_>) {
                let mut line = Line(String::new());
                event.record(&mut line);
                *self.0.lock().unwrap() = line.0;
            }

            fn enter(&self, _: &Id) {}

            fn exit(&self, _: &Id) {}
        }

        let kept = std::sync::Arc::default();
        let keep = LogCapture(std::sync::Arc::clone(&kept));
        tracing::subscriber::with_default(keep, || {
            tracing::warn!(port = "shm", n = 3, "port is {}", "gone");
        });
        assert_eq!(*kept.lock().unwrap(), "port is gone port=\"shm\" n=3");
    }
}
