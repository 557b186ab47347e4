//! The possible mutations of a source file, and the file with some of them behind switches.
//!
//! All tested mutations are in one build: `a == b` becomes `(if crate::mutant::on(7) { (a) != (b) }
//! else { a == b })`, and [`SWITCH`] is the module whose `on` reads the number from the
//! environment. Constant expressions, patterns, macros, tests, compiler hints and code of the
//! simulator's planted bugs are not mutated.

use std::cmp::Reverse;
use std::ops::Range;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Expr, Stmt};

/// Environment variable with the number of the enabled mutation.
pub(super) const VARIABLE: &str = "BAREWIRE_MUTANT";

/// Environment variable with the path of a file: each thread that reaches a mutation for the first
/// time appends a line `NUMBER THREAD`.
pub(super) const REACHED: &str = "BAREWIRE_REACHED";

/// Source of the module `mutant` of the mutated crate.
pub(super) const SWITCH: &str = include_str!("switch.rs");

/// A mutation of one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    /// Byte range in the file.
    at: Range<usize>,
    how: How,
    /// Place and change for a reader: `LINE:COLUMN: replace == with != in FUNCTION`.
    pub(super) label: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum How {
    /// Replaces the expression.
    Instead(String),
    /// Inserts a statement. The range is empty.
    First(String),
    /// Removes the statement.
    Without,
}

/// All mutations of a file, in source order.
///
/// # Errors
/// The text is not valid Rust.
pub(super) fn of(text: &str) -> Result<Vec<Change>, String> {
    let file = syn::parse_file(text).map_err(|why| why.to_string())?;
    let mut finder = Finder { text, function: String::new(), found: Vec::new() };
    finder.visit_file(&file);
    finder.found.sort_by_key(|change| (change.at.start, Reverse(change.at.end)));
    Ok(finder.found)
}

/// `text` with `changes`, each behind the switch of its number, and the byte range of each in the
/// new text.
pub(super) fn switched(
    text: &str,
    changes: &[(usize, &Change)],
) -> (String, Vec<(usize, Range<usize>)>) {
    // Starts and ends of ranges, in output order: ends before starts; of ends the inner one first,
    // of starts the outer one. Inserted statements come at the start.
    let mut marks = Vec::new();
    for (i, (_, change)) in changes.iter().enumerate() {
        let Range { start, end } = change.at;
        match change.how {
            How::First(_) => marks.push(((start, 1, Reverse(end), i), i)),
            _ => {
                marks.push(((start, 2, Reverse(end), i), i));
                marks.push(((end, 0, Reverse(start), usize::MAX - i), i));
            }
        }
    }
    marks.sort();
    let mut out = String::new();
    let mut ranges: Vec<_> = changes.iter().map(|(n, _)| (*n, 0..0)).collect();
    let mut copied = 0;
    for ((at, side, ..), i) in marks {
        out.push_str(&text[copied..at]);
        copied = at;
        let (n, change) = changes[i];
        let range = &mut ranges[i].1;
        if side > 0 {
            range.start = out.len();
        }
        out += &match (&change.how, side) {
            (How::First(code), _) => format!(" if crate::mutant::on({n}) {{ {code} }}"),
            (How::Instead(code), 2) => format!("(if crate::mutant::on({n}) {{ {code} }} else {{ "),
            (How::Instead(_), _) => " })".to_owned(),
            (How::Without, 2) => format!("if !crate::mutant::on({n}) {{ "),
            (How::Without, _) => " }".to_owned(),
        };
        range.end = out.len();
    }
    out.push_str(&text[copied..]);
    (out, ranges)
}

struct Finder<'a> {
    text: &'a str,
    /// Name of the function that is being visited.
    function: String,
    found: Vec<Change>,
}

impl Finder<'_> {
    fn record(&mut self, at: Range<usize>, how: How, what: &str) {
        let before = &self.text[..at.start];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        let label = format!("{line}:{column}: {what} in {}", self.function);
        self.found.push(Change { at, how, label });
    }

    fn source(&self, part: &impl Spanned) -> &str {
        &self.text[part.span().byte_range()]
    }

    /// Mutation of a function: it returns at once, if there is a value to return.
    fn function(&mut self, sig: &syn::Signature, block: &syn::Block) {
        self.function = sig.ident.to_string();
        let values: &[&str] = match &sig.output {
            syn::ReturnType::Default => &[""],
            syn::ReturnType::Type(_, ty) => match self.source(ty) {
                "bool" => &["true", "false"],
                ty if ty.starts_with("Option<") => &["None"],
                _ => &[],
            },
        };
        let open = block.brace_token.span.open().byte_range().end;
        let body = self.text[open..block.brace_token.span.close().byte_range().start].trim();
        for value in values.iter().filter(|&&value| value != body) {
            let how = How::First(format!("return {value};"));
            self.record(open..open, how, format!("return {value}").trim_end());
        }
        self.visit_block(block);
    }
}

/// Replacements of an operator.
fn others(op: &BinOp) -> &'static [&'static str] {
    match op {
        BinOp::Eq(_) => &["!="],
        BinOp::Ne(_) => &["=="],
        BinOp::Lt(_) => &["<=", ">="],
        BinOp::Le(_) => &["<", ">"],
        BinOp::Gt(_) => &[">=", "<="],
        BinOp::Ge(_) => &[">", "<"],
        BinOp::And(_) => &["||"],
        BinOp::Or(_) => &["&&"],
        BinOp::Add(_) => &["-"],
        BinOp::Sub(_) => &["+"],
        BinOp::Mul(_) => &["/"],
        BinOp::Div(_) | BinOp::Rem(_) => &["*"],
        BinOp::BitAnd(_) => &["|"],
        BinOp::BitOr(_) | BinOp::BitXor(_) => &["&"],
        BinOp::Shl(_) => &[">>"],
        BinOp::Shr(_) => &["<<"],
        BinOp::AddAssign(_) => &["-="],
        BinOp::SubAssign(_) => &["+="],
        BinOp::MulAssign(_) => &["/="],
        BinOp::DivAssign(_) | BinOp::RemAssign(_) => &["*="],
        BinOp::BitAndAssign(_) => &["|="],
        BinOp::BitOrAssign(_) | BinOp::BitXorAssign(_) => &["&="],
        BinOp::ShlAssign(_) => &[">>="],
        BinOp::ShrAssign(_) => &["<<="],
        _ => &[],
    }
}

/// Whether `code` queries a planted bug of the simulator, which other builds do not have.
fn queries_bug(code: &str) -> bool {
    code.contains("planted(")
}

/// Whether `e` is true only with a planted bug.
fn is_of_bug(e: &Expr) -> bool {
    match e {
        Expr::Call(call) => matches!(&*call.func, Expr::Path(p) if p.path.is_ident("planted")),
        Expr::Binary(b) => {
            matches!(b.op, BinOp::And(_)) && (is_of_bug(&b.left) || is_of_bug(&b.right))
        }
        Expr::Paren(inner) => is_of_bug(&inner.expr),
        _ => false,
    }
}

/// Whether `attrs` mark a function as part of a planted bug.
fn for_bug(attrs: &[syn::Attribute]) -> bool {
    let says = |a: &syn::Attribute| match &a.meta {
        syn::Meta::NameValue(doc) => matches!(&doc.value, Expr::Lit(syn::ExprLit {
            lit: syn::Lit::Str(text), ..
        }) if text.value().contains("[`Bug::")),
        _ => false,
    };
    attrs.iter().any(says)
}

/// Whether the call `e` is only a hint to the compiler or the processor.
fn is_hint(e: &Expr) -> bool {
    match e {
        Expr::Call(call) => matches!(&*call.func, Expr::Path(p) if p.path.is_ident("cold")),
        Expr::MethodCall(call) => call.method.to_string().starts_with("prefetch"),
        _ => false,
    }
}

/// Whether `e` binds names: part of a `let` chain, which cannot be parenthesized.
fn binds(e: &Expr) -> bool {
    match e {
        Expr::Let(_) => true,
        Expr::Binary(b) => binds(&b.left) || binds(&b.right),
        _ => false,
    }
}

/// Whether `attrs` mark test-only code.
fn for_tests(attrs: &[syn::Attribute]) -> bool {
    let is_test = |list: &syn::MetaList| {
        list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word == "test")
    };
    attrs.iter().any(|a| match &a.meta {
        syn::Meta::List(list) => list.path.is_ident("cfg") && is_test(list),
        other => other.path().is_ident("test"),
    })
}

impl<'ast> Visit<'ast> for Finder<'_> {
    // Not mutated: constant expressions, types, patterns and attributes.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_path(&mut self, _: &'ast syn::Path) {}
    fn visit_angle_bracketed_generic_arguments(
        &mut self,
        _: &'ast syn::AngleBracketedGenericArguments,
    ) {
    }
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
    fn visit_expr_repeat(&mut self, e: &'ast syn::ExprRepeat) {
        self.visit_expr(&e.expr);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if item.sig.constness.is_none() && !for_tests(&item.attrs) && !for_bug(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if item.sig.constness.is_none() && !for_tests(&item.attrs) && !for_bug(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.function(&item.sig, block);
        }
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if let Stmt::Expr(e, Some(_)) = stmt {
            let called = if let Expr::Try(e) = e { &e.expr } else { e };
            if matches!(called, Expr::Call(_) | Expr::MethodCall(_)) && !is_hint(called) {
                let words: Vec<&str> = self.source(stmt).split_whitespace().collect();
                let what = format!("delete {}", words.join(" "));
                self.record(stmt.span().byte_range(), How::Without, &what);
            }
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr_if(&mut self, e: &'ast syn::ExprIf) {
        if !is_of_bug(&e.cond) {
            visit::visit_expr_if(self, e);
        } else if let Some((_, otherwise)) = &e.else_branch {
            self.visit_expr(otherwise);
        }
    }

    fn visit_expr_binary(&mut self, e: &'ast syn::ExprBinary) {
        if matches!(e.op, BinOp::And(_)) && (is_of_bug(&e.left) || is_of_bug(&e.right)) {
            return;
        }
        if !binds(&e.left) && !binds(&e.right) && !queries_bug(self.source(e)) {
            let (left, right) = (self.source(&e.left), self.source(&e.right));
            let op = self.source(&e.op).to_owned();
            let all = others(&e.op).iter().map(|&other| match other {
                "==" | "!=" | "<=" | ">=" => (other, format!("({left}) {other} ({right})")),
                _ if other.ends_with('=') => (other, format!("{left} {other} {right}")),
                _ => (other, format!("({left}) {other} ({right})")),
            });
            for (other, code) in all.collect::<Vec<_>>() {
                let what = format!("replace {op} with {other}");
                self.record(e.span().byte_range(), How::Instead(code), &what);
            }
        }
        visit::visit_expr_binary(self, e);
    }

    fn visit_expr_unary(&mut self, e: &'ast syn::ExprUnary) {
        if !matches!(e.op, syn::UnOp::Deref(_)) && !queries_bug(self.source(e)) {
            let code = self.source(&e.expr).to_owned();
            let what = format!("delete {}", self.source(&e.op));
            self.record(e.span().byte_range(), How::Instead(code), &what);
        }
        visit::visit_expr_unary(self, e);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(text: &str) -> Vec<String> {
        of(text).unwrap().into_iter().map(|change| change.label).collect()
    }

    #[test]
    fn operators_returns_and_calls_are_changed() {
        let text = "fn f(a: u8) -> bool {\n    g(a)?;\n    !(a < 3 && a != b + 1)\n}\n";
        assert_eq!(
            label(text),
            [
                "1:22: return true in f",
                "1:22: return false in f",
                "2:5: delete g(a)?; in f",
                "3:5: delete ! in f",
                "3:7: replace && with || in f",
                "3:7: replace < with <= in f",
                "3:7: replace < with >= in f",
                "3:16: replace != with == in f",
                "3:21: replace + with - in f",
            ]
        );
        assert_eq!(
            label("fn f() { x += 1; }"),
            ["1:9: return in f", "1:10: replace += with -= in f"]
        );
        assert_eq!(label("fn f() -> Option<u8> { Some(1) }"), ["1:23: return None in f"]);
    }

    #[test]
    fn constants_patterns_macros_and_tests_stay() {
        for text in [
            "const A: u8 = 1 + 2; static B: [u8; 1 + 2] = [0; 1 + 2];",
            "const fn f() -> bool { 1 < 2 }",
            "fn f() -> u8 { let x: [u8; 1 + 2] = [0; 1 + 2]; g::<{ 1 + 2 }>() }",
            "fn f(x: i8) -> u8 { match x { -1 => 0, 1 | 2 => 1, _ => 2 } }",
            "fn f() -> u8 { assert!(1 == 2); 0 }",
            "#[cfg(test)] mod tests { fn f() -> bool { 1 < 2 } }",
            "#[test] fn f() { g(1); }",
            "fn f() -> bool { if let Some(x) = y && z {} }",
            "fn f() -> u8 { if !planted(Bug::A) && !planted(Bug::B) {} }",
            "fn f() {}",
        ] {
            let all = label(text);
            assert!(all.iter().all(|one| one.contains(": return")), "{text}: {all:?}");
        }
        // The links of a chain that bind nothing.
        assert!(
            label("fn f() -> u8 { if let Some(x) = y && z == 1 {} }")[0].contains("replace ==")
        );
    }

    #[test]
    fn hints_and_what_a_planted_bug_does_stay() {
        for text in [
            "fn f() -> u8 { cold(()); slab.prefetch(x); self.peers.prefetch_free(); 0 }",
            "fn f() -> u8 { if planted(Bug::A) { g(1); } 0 }",
            "fn f() -> u8 { if x && planted(Bug::A) { g(1); } 0 }",
            "fn f() -> u8 { if !(planted(Bug::A) && x == 1) { 1 } else { 0 } }",
            "/// [`Bug::A`]: more.\nfn f() -> bool { g(1); x == 1 }",
            "impl A {\n/// So it is [`Bug::A`].\nfn f() -> bool { g(1); x == 1 } }",
        ] {
            assert_eq!(label(text), [""; 0], "{text}");
        }
        let text = "fn f() -> u8 { if planted(Bug::A) { g(1); } else { g(2); } 0 }";
        assert_eq!(label(text), ["1:52: delete g(2); in f"]);
        let text = "fn f() -> u8 { if !planted(Bug::A) || x { g(1); } 0 }";
        assert_eq!(label(text), ["1:43: delete g(1); in f"]);
    }

    #[test]
    fn each_change_has_its_switch() {
        let text = "fn f(a: u8) -> bool { g(a); a + 1 < 3 }";
        let all = of(text).unwrap();
        let numbered: Vec<_> = all.iter().enumerate().collect();
        let (out, ranges) = switched(text, &numbered);
        let on = |n| format!("if crate::mutant::on({n}) {{");
        assert_eq!(
            out,
            format!(
                "fn f(a: u8) -> bool {{ {} return true; }} {} return false; }} \
                 if !crate::mutant::on(2) {{ g(a); }} \
                 ({} (a + 1) <= (3) }} else {{ ({} (a + 1) >= (3) }} else {{ \
                 ({} (a) - (1) }} else {{ a + 1 }}) < 3 }}) }}) }}",
                on(0),
                on(1),
                on(3),
                on(4),
                on(5),
            )
        );
        assert!(out[ranges[5].1.clone()].starts_with("(if crate::mutant::on(5)"));
        assert!(out[ranges[5].1.clone()].ends_with("a + 1 })"));
        assert!(SWITCH.contains(VARIABLE) && SWITCH.contains(REACHED));
        assert_eq!(switched(text, &[]).0, text);
        syn::parse_file(&out).unwrap();
    }
}
