//! Captures log lines, for tests.

use std::fmt;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps each line, with its fields.
#[derive(Clone, Default)]
pub(super) struct Logged(Arc<Mutex<Vec<(Level, String)>>>);

impl Logged {
    /// The log lines of `say`.
    pub(super) fn by(say: impl FnOnce()) -> Vec<(Level, String)> {
        let kept = Self::default();
        tracing::subscriber::with_default(kept.clone(), say);
        kept.lines()
    }

    pub(super) fn lines(&self) -> Vec<(Level, String)> {
        self.0.lock().unwrap().clone()
    }
}

impl Subscriber for Logged {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push((*event.metadata().level(), text.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
