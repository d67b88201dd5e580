//! The macros of idem: [`macro@idempotent`] makes a handler of an async function, and [`macro@Classify`] says of an error
//! whether trying again is of use. Use them through `idem_core` or `idem_kafka`, which show them under these names.
//!
//! Inside: `parse` takes the tokens apart, `model` checks them, `expand` writes the result; `diagnostics` collects every
//! mistake on the way, so that all are reported at once. `tests/expand/` shows what is written, and `tests/ui/fail/` what
//! the compiler says to mistakes.

mod classify;
mod diagnostics;
mod duration;
mod expand;
mod model;
mod parse;
mod paths;
#[cfg(test)]
mod snapshots;

use proc_macro::TokenStream;

use quote::quote;

use crate::diagnostics::Diagnostics;
use crate::model::{HandlerFn, Settings};
use crate::paths::DefaultCrate;

#[doc = include_str!("idempotent.md")]
#[proc_macro_attribute]
pub fn idempotent(arguments: TokenStream, item: TokenStream) -> TokenStream {
    idempotent_in(DefaultCrate::Core, arguments.into(), item.into()).into()
}

// The same for those who depend on idem-kafka alone, which shows it as `idempotent` together with its documentation: a
// macro cannot know by which crate it was reached.
#[doc = include_str!("idempotent.md")]
#[doc(hidden)]
#[proc_macro_attribute]
pub fn idempotent_kafka(arguments: TokenStream, item: TokenStream) -> TokenStream {
    idempotent_in(DefaultCrate::Kafka, arguments.into(), item.into()).into()
}

#[doc = include_str!("classify.md")]
#[proc_macro_derive(Classify, attributes(classify))]
pub fn classify(input: TokenStream) -> TokenStream {
    classify::derive(DefaultCrate::Core, input.into()).into()
}

// The same for those who depend on idem-kafka alone, which shows it as `Classify`.
#[doc = include_str!("classify.md")]
#[doc(hidden)]
#[proc_macro_derive(ClassifyKafka, attributes(classify))]
pub fn classify_kafka(input: TokenStream) -> TokenStream {
    classify::derive(DefaultCrate::Kafka, input.into()).into()
}

/// Parse, check, expand.
///
/// With mistakes in the attribute the handler is expanded nevertheless, without what is wrong, so that the code that uses it
/// shows no errors of its own. With mistakes in the signature the function stays as it was.
fn idempotent_in(
    default_crate: DefaultCrate,
    arguments: proc_macro2::TokenStream,
    item: proc_macro2::TokenStream,
) -> proc_macro2::TokenStream {
    let mut diagnostics = Diagnostics::new();
    let arguments = parse::arguments(arguments, &mut diagnostics);
    let mut settings = Settings::check(&arguments, default_crate, &mut diagnostics);
    let handler = parse::function(item.clone(), &mut diagnostics)
        .and_then(|function| HandlerFn::check(function, &mut diagnostics));
    if let Some(handler) = &handler {
        settings.fit(handler, &mut diagnostics);
    }
    let expanded = handler.map_or(item, |handler| expand::expand(&handler, &settings));
    let errors = diagnostics.finish();
    quote!(#expanded #errors)
}
