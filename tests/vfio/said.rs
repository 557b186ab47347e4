//! What ports say.

use std::fmt;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Lines of the driver's that contain some words.
#[derive(Clone)]
pub(crate) struct Said {
    words: &'static str,
    lines: Arc<Mutex<Vec<(Level, String)>>>,
}

impl Said {
    /// None yet, of those with `words`.
    pub(crate) fn with(words: &'static str) -> Self {
        Self { words, lines: Arc::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.lines.lock().unwrap().len()
    }

    /// Those so far.
    pub(crate) fn lines(&self) -> Vec<(Level, String)> {
        self.lines.lock().unwrap().clone()
    }
}

impl Subscriber for Said {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.target().starts_with("barewire_driver")
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
        if text.0.contains(self.words) {
            self.lines.lock().unwrap().push((*event.metadata().level(), text.0));
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
