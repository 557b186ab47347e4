//! What the compiler cannot know: which ways are usual.

/// Returns `value`, on a way that the usual case does not take.
///
/// Otherwise the compiler takes both ways of a question for as likely: what follows twenty of them
/// then happens once in a million times, and has to live with the registers that are left. Compiles
/// to nothing.
#[cold]
pub fn rarely<T>(value: T) -> T {
    value
}
